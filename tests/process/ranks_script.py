"""A rank of a group of several. The last two arguments are a kind, and the number of epochs. In the kinds
"ddp", "reproducible", "fsdp" and "compiled" the ranks read different data; in "tensor" each has a part of
each layer.
"""

import hashlib
import os
import sys
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import torchft

torch.manual_seed(0)
torch.set_num_threads(1)
kind = sys.argv[-2]
job = torchft.Job(device="cpu", reproducible=kind == "reproducible")
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
inputs = torch.randn(64, 4)
same_data = {}
if kind == "fsdp":
    fully_shard(net, mesh=job.mesh)
elif kind == "tensor":
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["shard"])
    same_data = {"data_rank": 0, "data_world_size": 1}
elif kind == "compiled":
    net.compile(backend="aot_eager")  # in place of a compiler of C++, which a machine may lack
elif os.environ["RANK"] != "0":
    nn.init.ones_(net[0].weight)  # the ranks of a group begin with the weights of rank 0
model, _ = job.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
epochs = int(sys.argv[-1])
for step in job.loader(dataset, global_batch_size=16, micro_batch_size=2, epochs=epochs, **same_data):
    for x, y in step:
        step.backward((model(x) - y).square().mean())
    norm = step.clip(1.0)
    if step.commit():
        print(f"step {job.step} norm {norm:.6f} loss {step.loss:.6f}", flush=True)
    time.sleep(0.02)
weights = [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in net.parameters()]
digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights))
print(f"rank {job.name[-1]} step {job.step} weights {digest.hexdigest()}", flush=True)
