"""A batch of the same size with any number of groups: docs/dlrover.md.

    MAX_WORKER_NUM=2 torchft run --replicas 2 python/examples/dlrover_loop.py

starts a lighthouse and two groups of it on this machine.
"""

import torch

from torchft import Manager
from torchft.dlrover import DistributedOptimizer
from torchft.process_group import ProcessGroupGloo

net = torch.nn.Linear(2, 1)
adam = torch.optim.Adam(net.parameters(), lr=0.01)


def load_state_dict(state):
    net.load_state_dict(state["net"])
    adam.load_state_dict(state["adam"])


manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load_state_dict,
    state_dict=lambda: {"net": net.state_dict(), "adam": adam.state_dict()},
    min_replica_size=1,
)
optimizer = DistributedOptimizer(adam, fixed_global_batch_size=True, manager=manager)

while manager.current_step() < 500 and not manager.draining():
    optimizer.zero_grad()  # begins a step, if this is its first pass
    inputs = torch.rand(8, 2)
    loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()  # two passes with one group, one with two groups: 16 samples a step

print(f"weights {net.weight.tolist()}")
manager.shutdown()
