"""A replica group of one process that heals in passing, and reports its progress.

It ends some steps after only two groups are left, one of them the joining group.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torch
from events import Commands, emit
from torch import nn
from torch.distributed import TCPStore

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.codec.digest import combine, digest

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--rate", type=int, required=True, help="bytes per second that a source serves")
parser.add_argument("--joins", required=True, help="name of the group that joins the other two")
parser.add_argument("--steps", type=int, required=True, help="steps with two groups, after which it ends")
args = parser.parse_args()

TIMEOUT = timedelta(seconds=60)
WIDTH = 256

torch.set_num_threads(1)
torch.manual_seed(args.group)
model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
pg = ProcessGroupGloo(timeout=TIMEOUT)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def load_state_dict(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["adam"])


manager = Manager(
    pg=pg,
    load_state_dict=load_state_dict,
    state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
    min_replica_size=1,
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
    lighthouse_addr=args.lighthouse,
    replica_id=f"group_{args.group}",
    timeout=TIMEOUT,
    quorum_timeout=TIMEOUT,
    checkpoint_transport=HTTPTransport(TIMEOUT, 0, bandwidth_limit=args.rate),
    heal_along=True,
)
optimizer = Optimizer(manager, adam)
wrapped = DistributedDataParallel(manager, model)
emit("ready")
Commands().next()
last = -1  # the step at which this group ends
reported = ""
while last < 0 or manager.current_step() < last:
    step = manager.current_step()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(1000 * step + args.group)
    wrapped(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
    optimizer.step()
    plan, error = manager._current.plan, manager.errored()
    assert plan is not None
    if manager.current_step() > step and error is None:
        emit("committed", step=step)
        names = [replica_id.split(":")[0] for replica_id in plan.replica_ids]
        if last < 0 and args.joins in names and len(names) == manager.num_participants() == 2:
            last = manager.current_step() + args.steps
    elif plan.source is not None and error is not None and str(error.original_exception) != reported:
        reported = str(error.original_exception)
        emit("heals", far=reported, source=plan.source.replica_id)
weights = [
    *model.parameters(),
    *(adam.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")),
]
emit("finished", step=manager.current_step(), digest=int(combine([digest(weight) for weight in weights])))
manager.shutdown()
pg.shutdown()
