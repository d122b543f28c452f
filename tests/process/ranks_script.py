"""A rank of a group of several that read different data. The last two arguments are "ddp", "reproducible" or
"fsdp", and the number of epochs.
"""

import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import torchft

torch.manual_seed(0)
torch.set_num_threads(1)
kind = sys.argv[-2]
job = torchft.Job(device="cpu", reproducible=kind == "reproducible")
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
inputs = torch.randn(64, 4)
if kind == "fsdp":
    fully_shard(net, mesh=job.mesh)
elif os.environ["RANK"] != "0":
    nn.init.ones_(net[0].weight)  # the ranks of a group begin with the weights of rank 0
model, _ = job.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
for step in job.loader(dataset, global_batch_size=16, micro_batch_size=2, epochs=int(sys.argv[-1])):
    for x, y in step:
        step.backward((model(x) - y).square().mean())
    norm = step.clip(1.0)
    if step.commit():
        print(f"step {job.step} norm {norm:.6f} loss {step.loss:.6f}", flush=True)
    time.sleep(0.02)
weights = [(p.full_tensor() if kind == "fsdp" else p).detach() for p in net.parameters()]
digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
print(f"rank {job.name[-1]} step {job.step} weights {digest.hexdigest()}", flush=True)
