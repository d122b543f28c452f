"""The cost of copies in shared memory beside `torch.distributed.checkpoint.async_save`, and how soon a group
that goes on from one has committed a step.

One group of one rank on the CPU has a state of the given size. Its steps take `--step-ms`, in which the
processor is free, as with a GPU, or computes on one thread (`--busy`). For the cost, each round has a stretch
of steps without a copy, one with a copy, and one with an async_save to a disk, which lasts until that has
ended, in changing order. The ratio is that of the throughput with one copy in as many steps as
`snapshots="auto"` chooses for the median cost, to that without; async_save has the same distance. For the
start, the process is killed with -9 after a copy, and the next one measures the time from the end of
`import torch` to its first commit.

    python python/bench/snapshots.py --sizes 50 1000 4000 --rounds 8
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

from common import START_TIMEOUT_S, rotated
from processes import Child, Job, ours_path

STRETCH = 4  # steps
COMMAND_TIMEOUT_S = 540
THROUGHPUT_GOAL, START_GOAL_S = 0.99, 2.0


def worker(mb: int, step_ms: int, busy: bool) -> None:
    import torch

    imported = time.monotonic()
    from events import Commands, emit

    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    tensors = max(1, mb // 16)
    state = {f"{i}": torch.ones(mb * 250_000 // tensors) for i in range(tensors)}
    product = torch.randn(256, 256)

    def load(saved: dict[str, torch.Tensor]) -> None:
        for name, tensor in saved.items():
            state[name].copy_(tensor)

    dist_store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: state,
        min_replica_size=1,
        store_addr="localhost",
        store_port=dist_store.port,
        replica_id="bench",
        snapshots="auto",
    )

    def step() -> None:
        began = time.monotonic()
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        until = began + step_ms / 1000
        while busy and time.monotonic() < until:
            product.mm(product)
        time.sleep(max(0.0, until - time.monotonic()))
        assert manager.should_commit()

    step()
    emit("started", seconds=time.monotonic() - imported, step=manager.current_step())
    import torch.distributed.checkpoint as dcp

    commands = Commands()
    while (command := commands.next())["do"] != "end":
        mode, steps = command["do"], 0
        saved: Future[Any] | None = None
        copied = manager._snapshots.copied
        began = time.monotonic()
        while steps < STRETCH or not (saved is None or saved.done()):
            due = mode == "copy" and steps == 1
            manager._snapshots._next = manager.current_step() if due else sys.maxsize
            if mode == "async_save" and steps == 1:
                shutil.rmtree(command["folder"], ignore_errors=True)
                begun = dcp.async_save(state, checkpoint_id=command["folder"], no_dist=True)
                assert isinstance(begun, Future)
                saved = begun
            step()
            steps += 1
        seconds = time.monotonic() - began
        if saved is not None:
            saved.result()
        assert (mode == "copy") == (manager._snapshots.copied > copied), "the stretch has a copy, or none"
        emit("stretch", seconds=seconds, steps=steps)
    manager.shutdown(finished=True)


def start(job: Job, lighthouse: str, memory: str, args: argparse.Namespace, mb: int) -> Child:
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "TORCHFT_SNAPSHOT_MEMORY": memory,
        "TORCHFT_JOB_ID": "bench",
    }
    argv = ["--worker", "--sizes", mb, "--step-ms", args.step_ms, *(["--busy"] if args.busy else [])]
    child = job.python("rank", Path(__file__).resolve(), *argv, path=ours_path(), env=env)
    job.wait(lambda: child.of("started"), START_TIMEOUT_S, "a first step")
    return child


def stretch(job: Job, child: Child, mode: str, folder: str = "") -> tuple[float, int]:
    """Returns the seconds of some steps, and their number. `mode` is "none", "copy" or "async_save"."""
    before = len(child.of("stretch"))
    child.send(do=mode, folder=folder)
    job.wait(lambda: len(child.of("stretch")) > before, COMMAND_TIMEOUT_S, f"a stretch: {mode}")
    event = child.of("stretch")[-1]
    return event["seconds"], event["steps"]


def spread(values: Iterable[float], digits: int) -> str:
    """The median, and all runs in brackets."""
    ordered = sorted(values)
    low, middle, high = (f"{x:.{digits}f}" for x in (ordered[0], median(ordered), ordered[-1]))
    return f"{middle} [{low}, {high}]"


def measure(args: argparse.Namespace, mb: int) -> None:
    # The state, two slots, and what async_save copies; at a start what is read of a slot.
    needed, free = 4 * mb / 1000 + 1, available_gb()
    if free < needed:
        print(f"{mb} MB: skipped, since {needed:.0f} GB of memory are needed, and {free:.0f} are free")
        return
    with (
        tempfile.TemporaryDirectory(prefix="torchft-bench-", dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory(prefix="torchft-bench-", dir=args.folder) as disk,
        Job() as job,
    ):
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=1)
        child = start(job, lighthouse, memory, args, mb)
        for mode in ("copy", "copy", "async_save"):  # the first use of their memory
            stretch(job, child, mode, f"{disk}/saved")
        step_s, costs = [], {"copy": [], "async_save": []}
        for number in range(args.rounds):
            took = {}
            for mode in rotated(["none", *costs], number):
                took[mode] = stretch(job, child, mode, f"{disk}/saved")
            step_s.append(took["none"][0] / took["none"][1])
            for mode, of in costs.items():
                seconds, steps = took[mode]
                of.append(max(0.0, seconds - steps * step_s[-1]))
        show_costs(mb, step_s, costs)
        seconds = []
        for _ in range(args.starts):
            child.kill()
            child = start(job, lighthouse, memory, args, mb)
            (event,) = child.of("started")
            assert event["step"] > 1, "it did not go on from a copy"
            seconds.append(event["seconds"])
            stretch(job, child, "copy")
        print(
            f"{mb} MB: {spread(seconds, 2)} s from the import of PyTorch to the first commit after a copy "
            f"(goal with 1000 MB: at most {START_GOAL_S:g})",
            flush=True,
        )
        child.send(do="end")
        job.wait_exit([child], 30)


def show_costs(mb: int, step_s: list[float], costs: dict[str, list[float]]) -> None:
    """Prints what one copy, and one async_save, costs, and the throughput with one in each interval."""
    from torchft._manager.snapshots.rate import interval

    step = median(step_s)
    steps = interval(step, median(costs["copy"]))
    print(f"{mb} MB: one in {steps} steps of {1000 * step:.0f} ms", flush=True)
    ratios = {mode: [1 / (1 + cost / (steps * step)) for cost in of] for mode, of in costs.items()}
    for mode, of in costs.items():
        goal = f" (goal: at least {THROUGHPUT_GOAL:g})" if mode == "copy" else ""
        print(
            f"{mb} MB: {mode} costs {spread((1000 * cost for cost in of), 0)} ms; throughput "
            f"{spread(ratios[mode], 4)} of that without{goal}",
            flush=True,
        )
    both = [ours / theirs for ours, theirs in zip(ratios["copy"], ratios["async_save"])]
    print(f"{mb} MB: copies have {spread(both, 4)} of the throughput with async_save", flush=True)


def available_gb() -> float:
    """The memory that the system can give, in 10^9 bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure copies in shared memory, and a start from one.")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[50, 1000], help="of state, in MB; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=8, help="of three stretches; default: %(default)s")
    parser.add_argument("--starts", type=int, default=5, help="after a kill; default: %(default)s")
    parser.add_argument("--step-ms", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--busy", action="store_true", help="compute in place of a pause")
    parser.add_argument("--folder", help="on a disk, for async_save; default: that of temporary files")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("sizes", "rounds", "starts", "step_ms"):
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name.replace('_', '-')} {given}: allowed is 1 or more")
    if args.worker:
        worker(args.sizes[0], args.step_ms, args.busy)
        return
    for mb in args.sizes:
        measure(args, mb)


if __name__ == "__main__":
    main()
