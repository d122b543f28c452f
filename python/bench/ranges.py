"""The cost of the Manager's profiler ranges (`torchft::manager::…`) in the step of step.py, two groups of one rank.

Both groups run it with the ranges, and with what is in them called directly, by turns in the same processes: while
nothing is profiled, and while PyTorch's profiler runs.
"""

from __future__ import annotations

from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, markdown_table, rotated, start_groups
from processes import Job

PROFILED = {"nothing": False, "PyTorch's profiler, CPU": True}
STEPS = 200
COMMAND_TIMEOUT_S = 120


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the times of a step in milliseconds. Upstream's ranges cannot be taken out."""
    samples: dict[str, dict[str, list[float]]] = {name: {"without": [], "with": []} for name in PROFILED}
    with Job() as job:
        _, address = job.lighthouse(ours.path, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000)
        workers = start_groups(job, ours, 2, 1)
        workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        workers.do(COMMAND_TIMEOUT_S, do="steps", count=20)
        for number in range(rounds):
            for name, profiled in PROFILED.items():
                for side in rotated(("without", "with"), number):
                    workers.do(COMMAND_TIMEOUT_S, do="ranges", kept=side == "with")
                    answers = workers.do(COMMAND_TIMEOUT_S, do="steps", count=STEPS, profiled=profiled)
                    if any(answer["failed"] or answer["participants"] != 2 for answer in answers):
                        raise RuntimeError(f"ranges, {name}: not all steps were committed by both groups")
                    samples[name][side].append(Spread.of(t for a in answers for t in a["step"]).median)
            progress(f"ranges, round {number + 1}/{rounds}")
    return {
        name: {
            **{side: vars(Spread.of(values)) for side, values in sides.items()},
            "difference": vars(Spread.of(1000 * (a - b) for a, b in zip(sides["with"], sides["without"]))),
            "ratio": vars(Spread.of(a / b for a, b in zip(sides["with"], sides["without"]))),
        }
        for name, sides in samples.items()
    }


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for name in PROFILED:
        spread = {key: Spread(**value) for key, value in result[name].items()}
        rows.append(
            [
                name,
                spread["without"].middle(),
                spread["with"].middle(),
                spread["difference"].text(0),
                spread["ratio"].text(),
            ]
        )
    return markdown_table(
        ["profiled", "without ranges, ms", "with ranges, ms", "difference, µs", "with / without"], rows
    )
