"""A training loop with FTLib: docs/ftlib.md. Its argument is a directory that all members can access, or its
arguments are a port and the seeds.

Start any number of processes, kill some of them, and start them again: all running processes train together.
"""

import sys

import torch

from torchft.ftlib import FTAllReduceStatus, FTLib
from torchft.process_group import ProcessGroupGloo

net = torch.nn.Linear(2, 1)
adam = torch.optim.Adam(net.parameters(), lr=0.01)


def load_state_dict(state):
    net.load_state_dict(state["net"])
    adam.load_state_dict(state["adam"])


gossip = len(sys.argv) > 2
settings: dict = {"directory": sys.argv[1]}
if gossip:
    settings = {"name": f"port-{sys.argv[1]}", "port": int(sys.argv[1]), "seeds": sys.argv[2:]}

ftlib = FTLib.init(
    consensus="gossip" if gossip else "shared_storage",
    framework=ProcessGroupGloo(),
    state_dict=lambda: {"net": net.state_dict(), "adam": adam.state_dict()},
    load_state_dict=load_state_dict,
    **settings,
)

while ftlib.step < 1000:
    adam.zero_grad()
    inputs = torch.rand(8, 2)
    loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    # averages over all members; if members joined or failed, it first connects the new list
    status = ftlib.wait_gradients_ready(net)
    if status in (FTAllReduceStatus.SUCCESS, FTAllReduceStatus.NO_NEED):
        adam.step()  # otherwise the gradients are invalid: compute them again

ftlib.close()
print(f"step {ftlib.step}, weights {net.weight.tolist()}")
