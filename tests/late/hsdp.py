"""One rank of a replica group that trains with FSDP2 on the test device: tests/process/hsdp_worker.py, on this device.

Sharded over the group's ranks, replicated over the groups. Started like a torchrun worker (RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT). Prints every step, and at its end the full weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests/process")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from events import Commands, emit  # noqa: E402
from hsdp_model import Model, batch  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from tests.late import load  # noqa: E402
from torchft import Manager, Optimizer  # noqa: E402
from torchft.device_mesh import ft_init_device_mesh  # noqa: E402

late = load()
from tests.late.group import ProcessGroupLate  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--lighthouse", required=True)
args = parser.parse_args()

TIMEOUT = timedelta(seconds=20)
rank, shards = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
commands = Commands()
torch.set_num_threads(1)
late.delays(10 * args.group + rank, 0, 200)
dist.init_process_group("cpu:gloo,late:late", timeout=timedelta(seconds=120))
torch.manual_seed(0)
model = Model().to("late")
manager = Manager(
    pg=ProcessGroupLate(timeout=TIMEOUT),
    load_state_dict=None,
    state_dict=None,
    min_replica_size=1,
    init_sync=False,  # all groups count from the first step on
    lighthouse_addr=args.lighthouse,
    replica_id=f"hsdp_{args.group}",
    timeout=TIMEOUT,
    quorum_timeout=TIMEOUT,
    connect_timeout=TIMEOUT,
)
mesh = ft_init_device_mesh(
    device_type="late",
    mesh_shape=(2, shards),
    mesh_dim_names=("replicate", "shard"),
    replicate_dim=0,
    manager=manager,
)
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
weights = model.state_dict()  # once: the sharded weights themselves
manager.set_state_dict_fns(
    lambda s: (model.load_state_dict(s["model"]), adam.load_state_dict(s["optim"])),
    lambda: {"model": weights, "optim": adam.state_dict()},
)
optimizer = Optimizer(manager, adam)
emit("ready")
last = commands.next()["step"]
while manager.current_step() < last:
    step = manager.current_step()
    optimizer.zero_grad()
    x, y = (t.to("late") for t in batch(step, args.group, rank))
    nn.functional.mse_loss(model(x), y).backward()
    participants = manager.num_participants()
    optimizer.step()
    emit("step", step=step, committed=manager.current_step() > step, participants=participants)

full = {name: p.full_tensor().cpu() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
emit("finished", weights={name: p.flatten().tolist() for name, p in full.items()})
manager.shutdown()
dist.barrier()  # rank 0 hosts the store
os._exit(0)
