"""One rank of a replica group that trains with FSDP2 and an ElasticDataLoader; see test_loader.py.

Started like a torchrun worker (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Prints what each step trained on, and at
its end the full weights.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from events import Commands, emit
from loader_model import SETTINGS, dataset, loss_of, make_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchft import Manager, Optimizer
from torchft.data import ElasticDataLoader
from torchft.device_mesh import ft_init_device_mesh
from torchft.process_group import ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--seed", type=int, required=True, help="of the first weights")
parser.add_argument("--die_at", type=int, default=-1, help="the step in which it ends before its last backward pass")
parser.add_argument("--pause_at", type=int, default=-1, help="the step before which it waits for a word")
args = parser.parse_args()

TIMEOUT = timedelta(seconds=20)
commands = Commands()
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=120))
model = make_model(args.seed)
manager = Manager(
    pg=ProcessGroupGloo(timeout=TIMEOUT),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=1,
    lighthouse_addr=args.lighthouse,
    replica_id=f"loader_{args.group}",
    timeout=TIMEOUT,
    quorum_timeout=TIMEOUT,
    connect_timeout=TIMEOUT,
    heartbeat_interval=timedelta(milliseconds=50),
)
mesh = ft_init_device_mesh(
    device_type="cpu",
    mesh_shape=(1, dist.get_world_size()),
    mesh_dim_names=("replicate", "shard"),
    replicate_dim=0,
    manager=manager,
)
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
# Taken once: its tensors are the sharded weights themselves; see hsdp_worker.py.
weights = model.state_dict()
manager.set_state_dict_fns(
    lambda state: (model.load_state_dict(state["model"]), sgd.load_state_dict(state["sgd"])),
    lambda: {"model": weights, "sgd": sgd.state_dict()},
)
optimizer = Optimizer(manager, sgd)
loader = ElasticDataLoader(manager, dataset(), **SETTINGS)
emit("ready")
assert commands.next()["do"] == "train"

for step in loader:
    number = manager.current_step()
    if number == args.pause_at:
        args.pause_at = -1
        emit("paused")
        assert commands.next()["do"] == "train"
    optimizer.zero_grad()
    indices: list[int] = []
    for unit in step:
        if number == args.die_at and unit.last:
            manager.wait_quorum()  # the other group counts on this one
            os._exit(9)
        with unit.accumulate(model):
            (loss_of(model, *unit.data) * unit.weight).backward()
        if unit.weight:
            indices += unit.indices
    before = manager.batches_committed()
    optimizer.step()
    emit("step", step=number, committed=manager.batches_committed() > before, indices=indices)

full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
emit("finished", weights={name: p.flatten().tolist() for name, p in full.items()})
manager.shutdown()
dist.barrier()  # rank 0 hosts the store
os._exit(0)
