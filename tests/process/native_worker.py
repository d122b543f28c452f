"""A replica group of one process over PyTorch's own default group, which torchft reconfigures.

`dist` calls, functional collectives and the Manager use that one object. Commands are those of worker.py. At
every second step the group also checks a round of collectives among the present members.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from events import Commands, emit
from torch import nn, optim
from torch.distributed import TCPStore

from torchft import DistributedDataParallel, Manager, Optimizer

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--store", type=int, required=True, help="port of the store that all groups share")
parser.add_argument(
    "--timeout_s", type=int, required=True, help="timeout of collectives and of waiting for a quorum"
)
args = parser.parse_args()

TIMEOUT = timedelta(seconds=args.timeout_s)
commands = Commands()
torch.set_num_threads(1)
torch.manual_seed(args.group)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
adam = optim.Adam(model.parameters(), lr=1e-2)

shared = TCPStore("localhost", args.store, is_master=False, wait_for_workers=False)
dist.init_process_group(
    "gloo", store=shared, rank=args.group, world_size=3, timeout=TIMEOUT, enable_reconfigure=True
)
world = dist.group.WORLD
assert world is not None

reconfigured_ms: list[float] = []


class Timed(Manager):
    """Reports how long a reconfiguration took."""

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        started = time.perf_counter()
        super()._reconfigure_pg(communicator_id, handles)
        reconfigured_ms.append(1000 * (time.perf_counter() - started))


def state_dict() -> dict[str, dict]:
    return {"model": model.state_dict(), "optim": adam.state_dict()}


def load_state_dict(state: dict[str, dict]) -> None:
    model.load_state_dict(state["model"])
    adam.load_state_dict(state["optim"])


def digest() -> str:
    sha = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


def check_collectives() -> int:
    """Checks torch.distributed's collectives on its default group, among its present members. Returns their
    number.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert total.item() == n * (n - 1) / 2
    parts = [torch.zeros(2) for _ in range(n)]
    work = dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True)
    assert work is not None
    work.wait()
    assert [part[0].item() for part in parts] == list(range(n))
    sent = torch.tensor([float(rank)])
    dist.broadcast(sent, src=n - 1)
    assert sent.item() == n - 1
    dist.barrier()
    summed = functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", world))
    assert summed.tolist() == [float(n)] * 3
    return n


store = TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
emit("imported")
command = commands.next()
manager = Timed(
    pg=world,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    min_replica_size=1,
    lighthouse_addr=command["lighthouse"],
    replica_id=f"native_{args.group}",
    timeout=TIMEOUT,
    quorum_timeout=TIMEOUT,
    connect_timeout=TIMEOUT,
    heartbeat_interval=timedelta(milliseconds=50),
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adam)
emit("ready")
assert commands.next()["do"] == "train"

last_step = None
while last_step is None or manager.current_step() < last_step:
    if (command := commands.poll()) is not None:
        assert command["do"] == "finish"
        last_step = command["step"]
        continue
    step = manager.current_step()
    batch = torch.Generator().manual_seed(1000 * step + args.group)
    x, y = torch.randn(16, 8, generator=batch), torch.randn(16, 4, generator=batch)
    optimizer.zero_grad()
    time.sleep(0.02)  # time for a joining group to heal
    nn.functional.mse_loss(ddp(x), y).backward()
    members = 0
    # Every group runs these collectives at the same steps, including a healing group, which has the others'
    # step by now.
    manager.wait_quorum()
    if manager.errored() is None and manager.current_step() % 2 == 0:
        try:
            members = check_collectives()
        except (
            RuntimeError
        ) as e:  # a peer failed: these calls bypass the Manager, which would have kept the error
            manager.report_error(e)
    step = manager.current_step()
    optimizer.step()
    emit(
        "step",
        step=manager.current_step(),
        committed=manager.current_step() > step,
        participants=manager.num_participants(),
        members=members,
        rank=dist.get_rank(),
        digest=digest(),
        reconfigured_ms=reconfigured_ms,
        same=dist.group.WORLD is world,
    )

emit("finished", step=manager.current_step(), digest=digest())
manager.shutdown()
dist.destroy_process_group()
