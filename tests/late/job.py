"""A replica group of one process that trains a small model on the test device; one script for every kind of
job.

Commands, in this order: {"do": "join", "lighthouse": ADDRESS} makes the Manager, {"do": "finish", "step": N}
ends after step N. Each step prints the digest of the weights, and the end the devices that have a context.
With --fails this process kills itself in a step's last bucket; with --stalls its device stands still in one,
until the deadline of the operation.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests/process")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from events import Commands, emit  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import FileStore, HashStore, TCPStore  # noqa: E402

from tests.late import load  # noqa: E402
from torchft import DistributedDataParallel, Manager, Optimizer  # noqa: E402
from torchft.checkpointing.pg_transport import PGTransport  # noqa: E402
from torchft.local_sgd import DiLoCo, LocalSGD  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--group", type=int, required=True)
parser.add_argument("--seed", type=int, required=True, help="for the initial weights and the delays")
parser.add_argument("--kind", choices=["ddp", "local_sgd", "diloco", "streaming"], default="ddp")
parser.add_argument("--pg", choices=["late", "native", "isolated"], default="late")
parser.add_argument("--transport", choices=["http", "pg"], default="http")
parser.add_argument("--timeout_s", type=float, default=10.0)
parser.add_argument("--device", type=int, default=0, help="index of the device")
parser.add_argument("--heal_along", action="store_true")
parser.add_argument("--world", action="store_true", help="also make a world with NCCL's rules, as HSDP does")
parser.add_argument("--store", help="file in which the native groups of the job meet")
parser.add_argument("--stalls", type=int, default=0, help="number of groups in whose second step it stalls")
parser.add_argument("--fails", type=int, default=0, help="number of groups in whose second step it fails")
args = parser.parse_args()
TIMEOUT = timedelta(seconds=args.timeout_s)


def main() -> None:
    commands = Commands()
    late = load()
    torch.set_num_threads(1)
    late.delays(args.seed, 0, 300)
    device = torch.device("late", args.device)

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    pg = make_pg(args.pg)
    if args.world:
        dist.init_process_group("late", store=HashStore(), rank=0, world_size=1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    emit("imported")
    manager = Manager(
        pg=pg,
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        use_async_quorum=args.kind == "ddp",
        heal_along=args.heal_along,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=commands.next()["lighthouse"],
        replica_id=f"late_{args.group}",
        checkpoint_transport=PGTransport(pg, timeout=TIMEOUT, device=device)
        if args.transport == "pg"
        else None,
    )
    # After the Manager was made: threads that torchft has started by then are on device 0.
    torch.accelerator.set_device_index(args.device)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4)).to(device)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    if args.fails:
        fail_in_the_last_bucket(pg, manager, args.fails)
    if args.stalls:
        stall_in_the_last_bucket(pg, manager, args.stalls)
    ddp = DistributedDataParallel(manager, model) if args.kind == "ddp" else model
    optimizer = Optimizer(manager, adam) if args.kind == "ddp" else adam
    last: int | None = None
    batches = 0
    decided: list[tuple[bool, int]] = []
    manager.register_commit_hook(
        lambda step, committed, participants: decided.append((committed, participants))
    )
    with algorithm(args.kind, manager, model, adam):
        while last is None or manager.current_step() < last:
            if (command := commands.poll()) is not None:
                last = command["step"]
                continue
            step = manager.current_step()
            # The batch depends on the step and the group, so a step that two groups did not share changes the
            # digest.
            x = torch.randn(
                16, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * batches + args.group)
            )
            batches += 1
            optimizer.zero_grad()
            loss = ddp(x.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            if not decided:
                continue
            committed, participants = decided.pop()
            emit(
                "step",
                step=manager.current_step(),
                committed=committed,
                participants=participants,
                digest=digest(model),
            )
    emit("finished", step=manager.current_step(), digest=digest(model))
    manager.shutdown()
    pg.shutdown()
    emit("contexts", made_by={str(index): stack for index, stack in late.contexts().items()})


def make_pg(kind: str) -> Any:
    from tests.late import group, isolated

    if kind == "native":
        return group.native_group(FileStore(args.store))
    if kind == "isolated":
        return isolated.ProcessGroupBabyLate(timeout=TIMEOUT)
    return group.ProcessGroupLate(timeout=TIMEOUT)


def fail_in_the_last_bucket(pg: Any, manager: Manager, groups: int) -> None:
    """Fails in the only bucket of the model: its launched kernel never runs, so the peers' kernels wait for
    it.
    """
    allreduce, steps = pg.allreduce, set()

    def launch(*given: Any) -> Any:
        if manager.num_participants() == groups:
            steps.add(manager.current_step())
        if len(steps) == 2:
            load().hold()
        work = allreduce(*given)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    pg.allreduce = launch


def stall_in_the_last_bucket(pg: Any, manager: Manager, groups: int) -> None:
    """The device stands still in the second step with so many groups, until the deadline of its operation."""
    allreduce, abort, steps = pg.allreduce, pg.abort, set()

    def launch(tensors: Any, opts: Any) -> Any:
        if manager.num_participants() == groups:
            steps.add(manager.current_step())
        if len(steps) != 2:
            return allreduce(tensors, opts)
        pg.allreduce = allreduce
        load().hold()
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(milliseconds=500)
        return allreduce(tensors, opts)

    def ends() -> None:
        abort()
        load().release()

    pg.allreduce, pg.abort = launch, ends


def algorithm(kind: str, manager: Manager, model: nn.Sequential, inner: torch.optim.Optimizer) -> Any:
    if kind == "ddp":
        return contextlib.nullcontext()
    if kind == "local_sgd":
        return LocalSGD(manager, model, inner, sync_every=2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    if kind == "diloco":
        return DiLoCo(manager, [model], inner, outer, sync_every=2)
    return DiLoCo(manager, [model], inner, outer, sync_every=3, fragment_sync_delay=1)


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        host = tensor.cpu()
        # checked here, because equal NaNs in all groups would have equal digests
        assert host.isfinite().all(), f"{name} is not finite"
        sha.update(name.encode())
        sha.update(host.numpy().tobytes())
    return sha.hexdigest()


if __name__ == "__main__":
    main()
