"""A replica group of one process that replays failed steps, and kills itself (SIGKILL) at a given step and
place.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from events import Commands, emit
from replay_model import BUCKET_MB, loss, new_model
from torch.distributed import TCPStore

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft._manager.step import collectives
from torchft.process_group import ProcessGroupBabyGloo

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--groups", type=int, required=True)
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--kind", choices=["gloo", "isolated", "native"], required=True)
parser.add_argument("--store", type=int, required=True, help="port of the store that native groups share")
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--fail_at", type=int, default=-1, help="step")
parser.add_argument("--place", default="")
parser.add_argument("--save", required=True, help="file for the weights")
args = parser.parse_args()

TIMEOUT = timedelta(seconds=60)
# In one of a hundred failures Gloo does not wake a send. With PyTorch 2.7 the step is then lost, unless the
# survivor waits until the send's timeout. So the timeout of operations is short here, and the wait for
# aborted operations is long.
OPERATION = timedelta(seconds=15)
collectives._DRAIN_SEC = 30.0


def fail() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def make_pg() -> Any:
    if args.kind == "gloo":
        return ProcessGroupGloo(timeout=OPERATION)
    if args.kind == "isolated":
        return ProcessGroupBabyGloo(timeout=OPERATION)
    store = TCPStore("localhost", args.store, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=args.group,
        world_size=args.groups,
        timeout=OPERATION,
        enable_reconfigure=True,
    )
    return dist.group.WORLD


class Mortal(Manager):
    """Ends before an allreduce, or after its group has voted to commit and before it has applied the step."""

    left = 1000

    def allreduce(self, *given: Any, **more: Any) -> Any:
        if self.left == 0:
            fail()
        self.left -= 1
        return super().allreduce(*given, **more)

    def _try_step(self, timeout: timedelta) -> bool:
        committed = super()._try_step(timeout)
        if fails and args.place == "commit":
            fail()
        return committed


def load_state_dict(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    sgd.load_state_dict(state["sgd"])


torch.set_num_threads(1)
model, sgd = new_model()
pg = make_pg()
group_store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Mortal(
    pg=pg,
    load_state_dict=load_state_dict,
    state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
    min_replica_size=1,
    init_sync=False,
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=group_store.port,
    lighthouse_addr=args.lighthouse,
    replica_id=f"group_{args.group}",
    timeout=TIMEOUT,
    quorum_timeout=TIMEOUT,
    replay_failed_step=True,
)
commits: list[bool] = []
participants: list[list[int]] = []


def note(step: int, committed: bool, count: int) -> None:
    commits.append(committed)
    if committed:
        plan = manager._current.plan
        assert plan is not None
        participants.append([int(i.split(":")[0].split("_")[1]) for i in plan.replica_ids][:count])


manager.register_commit_hook(note)
optimizer = Optimizer(manager, sgd)
wrapped = DistributedDataParallel(manager, model, bucket_cap_mb=BUCKET_MB)
fails = False
slowest = 0.0
emit("ready")
Commands().next()
while manager.current_step() < args.steps:
    began = time.monotonic()
    step = manager.current_step()
    fails = step == args.fail_at
    optimizer.zero_grad()
    value = loss(wrapped, step, args.group)
    if fails and args.place == "forward":
        manager.wait_quorum()
        fail()
    if fails and args.place.startswith("bucket"):
        manager.left = int(args.place[len("bucket") :])
    value.backward()
    optimizer.step()
    slowest = max(slowest, time.monotonic() - began)
torch.save(model.state_dict(), args.save)
emit(
    "finished",
    commits=commits,
    participants=participants,
    batches=manager.batches_committed(),
    slowest=slowest,
)
manager.shutdown()
if args.kind == "native":
    dist.destroy_process_group()
else:
    pg.shutdown()
