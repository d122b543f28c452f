"""What copies in shared memory cost, and how soon a group that goes on from one has committed a step.

One group of one rank on the CPU has a state of the given size. Its steps take `--step-ms`, in which the
processor is free, as with a GPU, or computes on one thread (`--busy`). For the cost, stretches of steps with
one copy alternate with as many steps without. The ratio is that of the throughput with `snapshots="auto"` to
that without, for the interval that the rule chooses for this cost. For the start, the process is killed with
-9 after a copy, and the next one measures the time from the end of `import torch` to its first commit.

    python python/bench/snapshots.py --mb 50 1000 --pairs 8
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import START_TIMEOUT_S
from processes import Child, Job, ours_path

STRETCH = 4  # steps
COMMAND_TIMEOUT_S = 540


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

    def step() -> float:
        began = time.monotonic()
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        until = began + step_ms / 1000
        while busy and time.monotonic() < until:
            product.mm(product)
        time.sleep(max(0.0, until - time.monotonic()))
        assert manager.should_commit()
        return time.monotonic() - began

    step()
    emit("started", seconds=time.monotonic() - imported, step=manager.current_step())
    commands = Commands()
    while (command := commands.next())["do"] != "end":
        seconds = []
        for number in range(STRETCH):
            copies = command["copy"] and number == 1
            manager._snapshots._next = manager.current_step() if copies else sys.maxsize
            seconds.append(step())
        emit("stretch", seconds=seconds)
    manager.shutdown(finished=True)


def start(job: Job, lighthouse: str, memory: str, args: argparse.Namespace, mb: int) -> Child:
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "TORCHFT_SNAPSHOT_MEMORY": memory,
    }
    argv = ["--worker", "--mb", mb, "--step-ms", args.step_ms, *(["--busy"] if args.busy else [])]
    child = job.python("rank", Path(__file__).resolve(), *argv, path=ours_path(), env=env)
    job.wait(lambda: child.of("started"), START_TIMEOUT_S, "a first step")
    return child


def stretch(job: Job, child: Child, copy: bool) -> float:
    """Returns the seconds of some steps, with one copy or without."""
    before = len(child.of("stretch"))
    child.send(do="train", copy=copy)
    job.wait(lambda: len(child.of("stretch")) > before, COMMAND_TIMEOUT_S, "a stretch of steps")
    return sum(child.of("stretch")[-1]["seconds"])


def measure(args: argparse.Namespace, mb: int) -> None:
    from torchft._manager.snapshots.rate import interval

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="torchft-bench-", dir=memory) as folder, Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=1)
        child = start(job, lighthouse, folder, args, mb)
        stretch(job, child, copy=True)  # the first use of the slots' memory
        stretch(job, child, copy=True)
        pairs = [(stretch(job, child, True), stretch(job, child, False)) for _ in range(args.pairs)]
        costs = [max(0.0, with_copy - without) for with_copy, without in pairs]
        step = median(without for _, without in pairs) / STRETCH
        steps = interval(step, median(costs))
        ratios = sorted(1 / (1 + cost / (steps * step)) for cost in costs)
        print(
            f"{mb} MB: a copy costs {1000 * median(costs):.0f} ms ({1000 * min(costs):.0f} to "
            f"{1000 * max(costs):.0f}), every {steps} steps of {1000 * step:.0f} ms; throughput "
            f"{median(ratios):.4f} ({ratios[0]:.4f} to {ratios[-1]:.4f}) of that without",
            flush=True,
        )
        seconds = []
        for _ in range(args.starts):
            child.kill()
            child = start(job, lighthouse, folder, args, mb)
            (event,) = child.of("started")
            assert event["step"] > 1, "it did not go on from a copy"
            seconds.append(event["seconds"])
            stretch(job, child, copy=True)
        print(
            f"{mb} MB: {median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f}) from the import of "
            "PyTorch to the first commit after a copy",
            flush=True,
        )
        child.send(do="end")
        job.wait_exit([child], 30)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure copies in shared memory, and a start from one.")
    parser.add_argument(
        "--mb", type=int, nargs="+", default=[50, 1000], help="of state; default: %(default)s"
    )
    parser.add_argument("--pairs", type=int, default=8, help="of stretches; default: %(default)s")
    parser.add_argument("--starts", type=int, default=5, help="after a kill; default: %(default)s")
    parser.add_argument("--step-ms", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--busy", action="store_true", help="compute in place of a pause")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in ("pairs", "starts", "step_ms"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: allowed is 1 or more")
    if args.worker:
        worker(args.mb[0], args.step_ms, args.busy)
        return
    for mb in args.mb:
        measure(args, mb)


if __name__ == "__main__":
    main()
