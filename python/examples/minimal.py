"""A training loop of two replica groups, of which any may fail and come back: the README's example.

    torchft run --replicas 2 --min-replicas 2 python/examples/minimal.py

starts a lighthouse and two groups that run this script on this machine. docs/training_loops.md shows the
script as a diff from a loop with PyTorch's own DistributedDataParallel.
"""

import torch

from torchft import DistributedDataParallel, Manager, Optimizer
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
model = DistributedDataParallel(manager, net)
optimizer = Optimizer(manager, adam)

while manager.current_step() < 1000 and not manager.draining():
    optimizer.zero_grad()  # asks which groups take part in this step, if they may have changed
    inputs = torch.rand(8, 2)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()  # averages the gradients over these groups
    optimizer.step()  # if no error occurred; otherwise the step does not count

manager.shutdown()  # says that the group leaves; under `torchft run` SIGTERM ends the loop
print(f"weights {net.weight.tolist()}")
