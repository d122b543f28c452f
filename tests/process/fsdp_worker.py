"""A rank of FSDP2 over PyTorch's default group, which torchft connects and reconfigures; prints its
weights.
"""

from __future__ import annotations

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
from events import Commands, emit
from hsdp_model import Model, batch
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.fsdp import fully_shard

from torchft.process_group import reconfigure_with_store
from torchft.process_group.native import abort_group

parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int, required=True)
parser.add_argument("--store", type=int, required=True)
parser.add_argument("--steps", type=int, required=True)
args = parser.parse_args()

TIMEOUT = timedelta(seconds=30)
commands = Commands()
torch.set_num_threads(1)
store = TCPStore("localhost", args.store, is_master=False, wait_for_workers=False)
dist.init_process_group(
    "gloo", store=store, rank=args.rank, world_size=2, timeout=TIMEOUT, enable_reconfigure=True
)
world = dist.group.WORLD
assert world is not None
reconfigure_with_store(world, f"localhost:{args.store}/first", args.rank, 2, TIMEOUT)

torch.manual_seed(0)
model = Model()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(args.steps):
    if step == args.steps // 2:
        abort_group(world)
        reconfigure_with_store(world, f"localhost:{args.store}/second", args.rank, 2, TIMEOUT)
    adam.zero_grad()
    x, y = batch(step, 0, args.rank)
    nn.functional.mse_loss(model(x), y).backward()
    adam.step()

full = {name: p.full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
emit("finished", weights={name: p.flatten().tolist() for name, p in full.items()})
dist.destroy_process_group()
