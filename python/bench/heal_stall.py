"""What a survivor feels of a joining group: its longest step while another group heals 50 MB, less its median step.

One group trains alone; a second one joins, heals the state from it and trains along. Measured from the moment the
newcomer makes its Manager until both have trained some steps together. Every step is looked at, with none left out.
Twice: with steps that compute nothing, and with steps that compute for 100 ms as a GPU does (the processor is free).
"""

from __future__ import annotations

import time
from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated, start_groups, verdict
from processes import Job

GOAL_MS = 100.0
STATE_MB = 50
COMPUTE_MS = (0, 100)
ALONE_S = 3.0
COMMAND_TIMEOUT_S = 60


def measure(ours: Side, published: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return, per length of a step, the survivor's stall and the newcomer's time to heal, in milliseconds."""
    with Job() as job:
        progress("heal stall: starting 4 processes")
        jobs: dict[str, tuple[str, Workers, Workers]] = {}
        for side in (ours, published):
            # Short, so that the group that left is forgotten before the next round.
            _, address = job.lighthouse(side.path, min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000)
            both = start_groups(job, side, 2, 1).children
            survivor, newcomer = Workers(job, both[:1]), Workers(job, both[1:])
            survivor.do(START_TIMEOUT_S, do="state", mb=STATE_MB)
            survivor.do(START_TIMEOUT_S, do="manager", lighthouse=address)
            jobs[side.name] = address, survivor, newcomer

        result: dict[str, Any] = {}
        for compute_ms in COMPUTE_MS:
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
            for number in range(rounds):
                for name in rotated(list(jobs), number):
                    rows[name].append(_round(job, *jobs[name], compute_ms))
                progress(
                    f"heal stall, steps of {compute_ms} ms, round {number + 1}/{rounds}: "
                    + ", ".join(f"{name} {rows[name][-1]['stall']:.0f} ms" for name in jobs)
                )
            result[str(compute_ms)] = {
                name: {key: vars(Spread.of(row[key] for row in mine)) for key in mine[0]} for name, mine in rows.items()
            }
    return result


def _round(job: Job, address: str, survivor: Workers, newcomer: Workers, compute_ms: float) -> dict[str, float]:
    child = survivor.children[0]
    newcomer.do(COMMAND_TIMEOUT_S, do="state", mb=STATE_MB)
    heard = len(child.of("surviving")), len(child.of("survive"))
    child.send(do="survive", compute_ms=compute_ms)
    job.wait(lambda: len(child.of("surviving")) > heard[0], COMMAND_TIMEOUT_S, "the survivor trains")
    time.sleep(ALONE_S)
    joined = newcomer.do(COMMAND_TIMEOUT_S, do="join", lighthouse=address, settle=12, compute_ms=compute_ms)[0]
    newcomer.do(COMMAND_TIMEOUT_S, do="leave")
    child.send(do="stop")
    job.wait(lambda: len(child.of("survive")) > heard[1], COMMAND_TIMEOUT_S, "the survivor stops")
    steps = child.of("survive")[-1]["steps"]

    # The second half of the time alone: the first may still be waiting for the group of the round before.
    alone = [end - begin for begin, end, *_ in steps if joined["began"] - ALONE_S / 2 < begin and end < joined["began"]]
    during = [end - begin for begin, end, *_ in steps if joined["began"] <= end <= joined["settled"]]
    lost = sum(not ok for _, end, ok, _ in steps if joined["began"] <= end <= joined["settled"])
    if not alone or not during:
        raise RuntimeError(f"the survivor made {len(alone)} steps before and {len(during)} while the other joined")
    if joined["healed"] < joined["made"]:
        raise RuntimeError("the newcomer trained without being healed")
    median = Spread.of(alone).median
    return {
        "median": 1000 * median,
        "longest_alone": 1000 * max(alone),
        "stall": 1000 * (max(during) - median),
        "heal": 1000 * (joined["healed"] - joined["began"]),
        "lost": lost,
    }


def tables(result: dict[str, Any], ours: str, published: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for compute_ms, sides in result.items():
        for name in (ours, published):
            figures = {key: Spread(**spread) for key, spread in sides[name].items()}
            stall = figures["stall"]
            goal = f" (goal <= {GOAL_MS:g}: {verdict(stall.median <= GOAL_MS)})" if name == ours else ""
            rows.append(
                [
                    compute_ms,
                    name,
                    figures["median"].text(1),
                    figures["longest_alone"].text(1),
                    stall.text(0) + goal,
                    figures["heal"].text(0),
                    f"{figures['lost'].median:g}",
                ]
            )
    head = [
        "compute a step, ms",
        "package",
        "median step, ms",
        "longest alone, ms",
        "longest while healing less median, ms",
        "newcomer's time to heal, ms",
        "survivor's steps lost",
    ]
    return markdown_table(head, rows)
