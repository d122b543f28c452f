"""The cost of comparing weights and optimizer state among the groups, in a step without faults.

Two replica groups as processes, Gloo, one rank each, no compute. A job with the comparison and one without
take turns. The figures are means over a turn, not medians: only each tenth step sends digests, and only the
first step of a sweep (torchft/_manager/checks/divergence.py) lists the tensors. Processor time is that of all
threads of a rank.
"""

from __future__ import annotations

from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated, start_groups
from processes import Job

SIZES_MB = {"51 MB": 51, "1 GB": 1007}  # weights and Adam's state; sums of whole layers
STEPS = 200
COMMAND_TIMEOUT_S = 120
STEP_MS = 100  # the table shows the cost as a percentage of a step of this length


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the milliseconds of a step without and with the comparison, for each size. Upstream has none."""
    return {
        size: _measure(ours, mb, rounds, lambda text, size=size: progress(f"{size}, {text}"))
        for size, mb in SIZES_MB.items()
    }


def _measure(ours: Side, mb: int, rounds: int, progress: Progress) -> dict[str, Any]:
    samples: dict[str, dict[str, list[float]]] = {name: {"step": [], "cpu": []} for name in ("off", "on")}
    with Job() as job:
        jobs: dict[str, Workers] = {}
        for name, setting in (
            ("off", {"TORCHFT_COMPARE_COMMITS": "0"}),
            ("on", {"TORCHFT_COMPARE_COMMITS": "auto"}),
        ):
            _, address = job.lighthouse(
                ours.path, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000
            )
            jobs[name] = workers = start_groups(job, ours, 2, 1, setting)
            workers.do(COMMAND_TIMEOUT_S, do="adam", mb=mb, trained=True)
            workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
            workers.do(START_TIMEOUT_S, do="compared")
            workers.do(COMMAND_TIMEOUT_S, do="steps", count=20)
        for number in range(rounds):
            for name in rotated(("off", "on"), number):
                answers = jobs[name].do(COMMAND_TIMEOUT_S, do="steps", count=STEPS)
                if any(answer["failed"] or answer["participants"] != 2 for answer in answers):
                    raise RuntimeError(f"divergence {name}: not all steps were committed by both groups")
                samples[name]["step"].append(sum(sum(a["step"]) for a in answers) / (2 * STEPS))
                samples[name]["cpu"].append(sum(a["cpu"] for a in answers) / 2)
            progress(f"round {number + 1}/{rounds}")
        (compared, _) = jobs["on"].do(START_TIMEOUT_S, do="sweep")
    figures = {
        f"{name}_{what}": vars(Spread.of(values))
        for name, sides in samples.items()
        for what, values in sides.items()
    }
    for what in ("step", "cpu"):
        more = (on - off for on, off in zip(samples["on"][what], samples["off"][what]))
        figures[f"more_{what}"] = vars(Spread.of(more))
    return {**figures, "sweep": compared["commits"]}


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for size, figures in ((size, result[size]) for size in SIZES_MB):
        more = Spread(**figures["more_step"])
        percent = 100 * figures["more_step"]["median"] / STEP_MS
        rows.append([size, str(figures["sweep"]), more.text(), f"{percent:.2f} %"])
    return markdown_table(["weights and Adam", "commits of a sweep", "more, ms", "of a step of 100 ms"], rows)
