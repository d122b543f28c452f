"""A training loop with FTLib: docs/ftlib.md. Its argument is a directory that all members see, or its arguments are a
port and the seeds.

Start it as often as you like, kill any of the processes, and start it again: all that run train together.
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
    status = ftlib.wait_gradients_ready(net)  # averages over all members; first connects them, if somebody came or went
    if status in (FTAllReduceStatus.SUCCESS, FTAllReduceStatus.NO_NEED):
        adam.step()  # else the gradients are of no use: compute them again

ftlib.close()
print(f"step {ftlib.step}, weights {net.weight.tolist()}")
