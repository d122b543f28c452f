"""The cost of a step without faults with replay_failed_step: start_quorum + allreduce + should_commit, no
compute.

Two replica groups as processes, Gloo, one rank each; a job with replay and a job without it take turns.
Replay copies the reduced tensors: 40 kB, and 40 MB.
"""

from __future__ import annotations

from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated, start_groups
from processes import Job

FLOATS = {"40 kB": 10_000, "40 MB": 10_000_000}
STEPS = {"40 kB": 200, "40 MB": 10}
COMMAND_TIMEOUT_S = 120


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the times of a step in milliseconds, without and with replay, for each size. Upstream has no
    replay.
    """
    samples: dict[str, dict[str, list[float]]] = {size: {"off": [], "on": []} for size in FLOATS}
    with Job() as job:
        jobs: dict[str, Workers] = {}
        for name, value in (("off", "0"), ("on", "1")):
            _, address = job.lighthouse(
                ours.path, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000
            )
            jobs[name] = workers = start_groups(job, ours, 2, 1, {"TORCHFT_REPLAY_FAILED_STEP": value})
            workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        for size, floats in FLOATS.items():
            for workers in jobs.values():
                workers.do(COMMAND_TIMEOUT_S, do="tensor", floats=floats)
                workers.do(COMMAND_TIMEOUT_S, do="steps", count=5)
            for number in range(rounds):
                for name in rotated(("off", "on"), number):
                    answers = jobs[name].do(COMMAND_TIMEOUT_S, do="steps", count=STEPS[size])
                    if any(answer["failed"] or answer["participants"] != 2 for answer in answers):
                        raise RuntimeError(f"replay {name}: not all steps were committed by both groups")
                    samples[size][name].append(Spread.of(t for a in answers for t in a["step"]).median)
                progress(f"replay, {size}, round {number + 1}/{rounds}")
    return {
        size: {
            **{name: vars(Spread.of(values)) for name, values in sides.items()},
            "ratio": vars(Spread.of(on / off for on, off in zip(sides["on"], sides["off"]))),
        }
        for size, sides in samples.items()
    }


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = [
        [
            size,
            *(Spread(**figures[name]).middle() for name in ("off", "on")),
            Spread(**figures["ratio"]).text(),
        ]
        for size, figures in result.items()
    ]
    return markdown_table(["reduced in a step", "off, ms", "on, ms", "on / off"], rows)
