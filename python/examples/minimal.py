"""A training loop of two replica groups, of which any may fail and come back: the README's example.

    torchft run --replicas 2 --min-replicas 2 python/examples/minimal.py

starts a lighthouse and two groups that run this script on this machine. docs/migrating.md shows the
script as a diff from a loop with PyTorch's own DistributedDataParallel.
"""

import torch
from torch.utils.data import TensorDataset

import torchft

torch.manual_seed(0)  # the same dataset in all groups
inputs = torch.rand(8000, 2)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
net = torch.nn.Linear(2, 1)
adam = torch.optim.Adam(net.parameters(), lr=0.01)

job = torchft.Job(device="cpu")  # process groups, Manager, SIGTERM: from the environment
model, optimizer = job.prepare(net, adam)
for step in job.loader(dataset, global_batch_size=16, micro_batch_size=4, epochs=2):
    for x, y in step:  # this rank's micro-batches
        step.backward((model(x) - y).square().mean())
    step.commit()  # the step counts, or the same batch comes again

print(f"weights {net.weight.tolist()}")
