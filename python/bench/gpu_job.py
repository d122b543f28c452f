"""Measurements of gpu_figures.py with two replica groups on one GPU: `gpu_job.py survivor|reserved|gap`.

Prints the figures as a JSON object. NCCL allows two ranks on one device from 2.30 on. With `--device cpu` the
same jobs run on Gloo, to try this program.

survivor: a group is killed; the other one, which also has a world of PyTorch's own, commits steps for a
minute. reserved: the memory of PyTorch's allocator after 1 and 40 quantized allreduces. gap: from the end of
the last allreduce of a step to the optimizer's first kernel, in train_fsdp.py.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REPOSITORY, START_TIMEOUT_S, Side, start_groups
from events import emit
from processes import Job, free_port, ours_path
from recovery import wait_for_commits

ALIVE_S = 60.0
COMPUTE_MS = 50
QUANTIZED_FLOATS = 1 << 22
STEPS = 60
TIMEOUT_S = 60.0
# Variables of this process that the survivor gets, too.
INHERITED = ("NCCL_", "TORCH_")


@dataclass(frozen=True)
class Span:
    """Something on the device: its name, begin and end in ns."""

    name: str
    begin: int
    end: int


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure jobs of two groups on one GPU.")
    parser.add_argument("subject", choices=["survivor", "reserved", "gap", "profile"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=ALIVE_S, help="for survivor; default: %(default)g")
    args = parser.parse_args()
    if args.subject == "profile":
        emit("profile", **profile(args.device))
        return
    figures = {
        "survivor": lambda: survivor(args.device, args.seconds),
        "reserved": lambda: reserved(args.device),
        "gap": lambda: gap(args.device),
    }[args.subject]()
    print(json.dumps(figures), flush=True)


def survivor(device: str, seconds: float) -> dict[str, Any]:
    """Return how many steps a survivor has committed in the seconds after the other group was killed.

    Raises:
        JobFailed: it has ended, or does not commit without the other group.
        SystemExit: it commits no more.
    """
    with Job() as job:
        side, kind = Side("ours", ours_path()), "nccl" if device == "cuda" else "gloo"
        _, address = job.lighthouse(
            side.path, min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
        )
        env = {name: value for name, value in os.environ.items() if name.startswith(INHERITED)}
        # Without the failure bus the watchdog of NCCL's group finds the failure, before torchft aborts the
        # group.
        both = start_groups(job, side, 2, 1, {**env, "TORCHFT_FAILURE_BUS": "0"})
        both.do(START_TIMEOUT_S, do="world", backend=kind)
        both.do(START_TIMEOUT_S, do="state", mb=1)
        both.do(START_TIMEOUT_S, do="manager", lighthouse=address, kind=kind)
        for child in both.children:
            child.send(do="survive", compute_ms=COMPUTE_MS)
        wait_for_commits(job, both.children, 2)
        alive, victim = both.children
        victim.kill()
        struck = time.monotonic()
        wait_for_commits(job, [alive], 1)
        noticed = time.monotonic() - struck
        # If the survivor ends, this raises.
        job.wait(lambda: time.monotonic() - struck >= seconds, seconds + TIMEOUT_S, "the survivor trains on")
        alive.send(do="stop")
        job.wait(lambda: alive.of("survive"), TIMEOUT_S, "the survivor stops")
        steps = [step for step in alive.of("survive")[-1]["steps"] if step[0] > struck]
        if not any(committed for begin, _, committed, _ in steps if begin > struck + 0.9 * seconds):
            raise SystemExit(
                f"the survivor lives, but has committed no step at the end of these {seconds:g} s"
            )
        return {"alive_s": seconds, "noticed_s": noticed, "committed": sum(step[2] for step in steps)}


def reserved(device: str) -> dict[str, Any]:
    """Return the reserved memory in MB of the rank that has more, after 1 and 40 quantized allreduces."""
    with Job() as job:
        side, kind = Side("ours", ours_path()), "nccl" if device == "cuda" else "gloo"
        _, address = job.lighthouse(
            side.path, min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
        )
        both = start_groups(job, side, 2, 1)
        both.do(START_TIMEOUT_S, do="state", mb=1)
        both.do(START_TIMEOUT_S, do="manager", lighthouse=address, kind=kind)
        figures: dict[str, Any] = {"tensor_mb": QUANTIZED_FLOATS * 4 / 1e6}
        for total, count in ((1, 1), (40, 39)):
            answers = both.do(TIMEOUT_S, do="quantized", count=count, floats=QUANTIZED_FLOATS, device=device)
            figures[f"after_{total}_mb"] = max(answer["reserved_mb"] for answer in answers)
            figures[f"failed_{total}"] = max(answer["failed"] for answer in answers)
        return figures


def gap(device: str) -> dict[str, Any]:
    """Return the median and the longest gap in µs of the steps of train_fsdp.py, in the second half of a
    short run.

    Raises:
        SystemExit: the profiler has seen no such steps.
    """
    with Job() as job:
        _, address = job.lighthouse(
            ours_path(), min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
        )
        children = []
        for group in range(2):
            env = {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(free_port()),
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": "2",
                "TORCHFT_LIGHTHOUSE": address,
                "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            }
            args = ("profile", "--device", device)
            children.append(job.python(f"group-{group}", Path(__file__), *args, path=ours_path(), env=env))
        job.wait_exit(children, START_TIMEOUT_S)
        spans = [Span(*span) for span in children[0].of("profile")[-1]["spans"]]
        found = gaps(spans)
        if not found:
            raise SystemExit(f"no allreduce before an optimizer among {len(spans)} kernels")
        later = found[len(found) // 2 :]
        return {
            "steps": len(found),
            "median_us": statistics.median(later) / 1e3,
            "longest_us": max(later) / 1e3,
        }


def gaps(spans: Iterable[Span]) -> list[int]:
    """Return for each step the ns from the end of its last allreduce to the begin of the optimizer's first
    kernel.

    An optimizer's kernels are those of PyTorch's `foreach` implementations, or in the range that the profiler
    gives to an optimizer.
    """
    found = []
    reduced: int | None = None  # the end of the last allreduce; None: the optimizer has begun since
    for span in sorted(spans, key=lambda s: s.begin):
        if "nccl" in span.name.lower() and "allreduce" in span.name.lower():
            reduced = max(reduced or 0, span.end)
        elif reduced is not None and (
            "multi_tensor_apply" in span.name or span.name.startswith("Optimizer.step")
        ):
            found.append(span.begin - reduced)
            reduced = None
    return found


def profile(device: str) -> dict[str, Any]:
    """Run train_fsdp.py in this process; return what ran on the device."""
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    sys.path.insert(0, str(REPOSITORY))
    sys.argv = ["train_fsdp.py", "--steps", str(STEPS), "--overtime", "0", "--device", device]
    with torch.profiler.profile(activities=activities) as profiler:
        runpy.run_path(str(REPOSITORY / "train_fsdp.py"), run_name="__main__")
    spans = []
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            begin, end = (round(1000 * us) for us in (event.time_range.start, event.time_range.end))
            spans.append((event.name, begin, end))
    return {"spans": spans}


if __name__ == "__main__":
    main()
