"""The throughput of a job in which one of four groups is half as fast as the others.

Four replica groups as processes, Gloo, one rank each, with an ElasticDataLoader. A unit waits, as for a GPU,
so that the processors of the machine do not count. The ideal is 3.5/4 of the throughput that the same job has
in the same round with four fast groups: that of its groups together, if none waits for another. In the first
steps the batch is cut evenly, and all groups wait for the slow one. All processes of a round are new.
"""

from __future__ import annotations

import statistics
from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, markdown_table, start_groups, verdict
from processes import Job

GROUPS, UNIT_MS, SLOWER = 4, 50, 2
IDEAL = (GROUPS - 1 + 1 / SLOWER) / GROUPS
UNITS = 28  # of a batch: as many as an ideal cut divides
FAST_STEPS, SLOW_STEPS = 10, 45
EVEN, SETTLED = 5, 20  # steps that are cut evenly for certain, and that are cut by speeds
GOAL = 0.95
FIGURES = ("fast", "even", "cut", "share")
COMMAND_TIMEOUT_S = 180


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the times of a step in milliseconds, and the shares of the ideal throughput. Upstream has no
    such loader.
    """
    samples: list[dict[str, Any]] = []
    for number in range(rounds):
        samples.append(once(ours))
        progress(f"slow_group, round {number + 1}/{rounds}: {samples[-1]['share']:.3f} of the ideal")
    spreads = {key: vars(Spread.of(sample[key] for sample in samples)) for key in FIGURES}
    return {**spreads, "units": samples[-1]["units"]}


def once(side: Side) -> dict[str, Any]:
    """Return the median times of a step with four fast groups, with an even cut and with one by speeds, the
    share of the ideal throughput, and the units of each group.
    """
    fast = statistics.median(train(side, FAST_STEPS, 1)[0]["step"][1:])
    answers = train(side, SLOW_STEPS, SLOWER)
    times = answers[0]["step"]
    cut = statistics.median(times[-SETTLED:])
    return {
        "fast": fast,
        "even": statistics.median(times[1:EVEN]),
        "cut": cut,
        "share": fast / cut / IDEAL,
        "units": [answer["units"][-1][-1] for answer in answers],
    }


def train(side: Side, steps: int, slower: float) -> list[Any]:
    """Return the answers of the groups, of which the last one is slower by this factor."""
    with Job() as job:
        _, address = job.lighthouse(
            side.path, min_replicas=GROUPS, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
        )
        workers = start_groups(job, side, GROUPS, 1)
        workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        for child in workers.children:
            unit_ms = UNIT_MS * (slower if child is workers.children[-1] else 1)
            command = {"do": "units", "sharded": False, "steps": steps, "units": UNITS, "unit_ms": unit_ms}
            child.send(**command, fail_at=-1, phase="", width=8)
        job.wait(
            lambda: all(child.of("units") for child in workers.children),
            COMMAND_TIMEOUT_S,
            "the groups train",
        )
        return [child.of("units")[-1] for child in workers.children]


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    spreads = {key: Spread(**result[key]) for key in FIGURES}
    share = spreads["share"]
    row = [
        " + ".join(map(str, result["units"])),
        *(spreads[key].middle(0) for key in ("fast", "even", "cut")),
        f"{share.text(3)} {verdict(share.median >= GOAL)}",
    ]
    head = [
        "units of the groups",
        "a step of four fast groups, ms",
        "one half as fast, cut evenly",
        "cut by speeds",
        f"share of the ideal throughput (goal >= {GOAL})",
    ]
    return markdown_table(head, [row])
