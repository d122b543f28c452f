"""The delay of a survivor while a group joins: its longest step during the heal, less its median step.

One group trains alone; a second one joins, heals from it and trains. Each of the survivor's steps is measured
from the moment when the joining group makes its Manager until both have trained some steps together. The
states have 50 MB, 1 GB and 4 GB, with steps that compute nothing; with 50 MB, whose transfer a step can hide,
also with steps that compute for 100 ms, like on a GPU (the processor is free).
"""

from __future__ import annotations

import time
from typing import Any

from common import (
    FEWEST_SAMPLES,
    START_TIMEOUT_S,
    Progress,
    Side,
    Spread,
    Workers,
    markdown_table,
    rotated,
    start_groups,
    verdict,
)
from processes import Job

GOAL_MS = 100.0
STATES_MB = (50, 1000, 4000)
# With the larger states, only one job at a time fits into the memory of a small machine. Its processes are
# new each time, like those of a joining group, because memory that a process used before is faster.
LARGE_MB = 1000
COMPUTE_MS = (0, 100)
ALONE_S = 3.0
COMMAND_TIMEOUT_S = 120

Row = dict[str, float]


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return, per size of the state, length of a step and side, the stall and the time to heal, in
    milliseconds.
    """
    result: dict[str, Any] = {}
    for mb in STATES_MB:
        number_of_rounds = rounds if mb < LARGE_MB else max(FEWEST_SAMPLES, rounds // 2)
        lengths = COMPUTE_MS if mb < LARGE_MB else COMPUTE_MS[:1]
        rows: dict[int, dict[str, list[Row]]] = {ms: {ours.name: [], upstream.name: []} for ms in lengths}

        def show(number: int, of: dict[int, dict[str, list[Row]]] = rows, mb: int = mb) -> None:
            latest = [
                f"{name} {r[-1]['stall']:.0f} ms" for sides in of.values() for name, r in sides.items() if r
            ]
            progress(f"heal stall, {mb} MB, round {number + 1}: {', '.join(latest)}")

        if mb < LARGE_MB:
            with Job() as job:
                pairs = {side.name: _start(job, side, mb) for side in (ours, upstream)}
                for number in range(number_of_rounds):
                    for compute_ms in lengths:
                        for name in rotated(list(pairs), number):
                            rows[compute_ms][name].append(_round(job, *pairs[name], mb, compute_ms))
                    show(number)
        else:
            for number in range(number_of_rounds):
                for compute_ms in lengths:
                    for side in rotated((ours, upstream), number):
                        with Job() as job:
                            rows[compute_ms][side.name].append(
                                _round(job, *_start(job, side, mb), mb, compute_ms)
                            )
                show(number)
        result[f"{mb} MB"] = {
            str(compute_ms): {
                name: {key: vars(Spread.of(row[key] for row in mine)) for key in mine[0]}
                for name, mine in sides.items()
            }
            for compute_ms, sides in rows.items()
        }
    return result


def _start(job: Job, side: Side, mb: int) -> tuple[str, Workers, Workers]:
    """Start a job whose first group trains already. Return the lighthouse's address, that group, and
    the other group.
    """
    # Short, so that the lighthouse forgets the group that left before the next round.
    _, address = job.lighthouse(side.path, min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000)
    both = start_groups(job, side, 2, 1).children
    survivor, newcomer = Workers(job, both[:1]), Workers(job, both[1:])
    survivor.do(START_TIMEOUT_S, do="state", mb=mb)
    survivor.do(START_TIMEOUT_S, do="manager", lighthouse=address)
    return address, survivor, newcomer


def _round(job: Job, address: str, survivor: Workers, newcomer: Workers, mb: int, compute_ms: float) -> Row:
    child = survivor.children[0]
    newcomer.do(COMMAND_TIMEOUT_S, do="state", mb=mb)
    before = len(child.of("surviving")), len(child.of("survive"))
    child.send(do="survive", compute_ms=compute_ms)
    job.wait(lambda: len(child.of("surviving")) > before[0], COMMAND_TIMEOUT_S, "the survivor trains")
    time.sleep(ALONE_S)
    joined = newcomer.do(COMMAND_TIMEOUT_S, do="join", lighthouse=address, settle=12, compute_ms=compute_ms)[
        0
    ]
    newcomer.do(COMMAND_TIMEOUT_S, do="leave")
    child.send(do="stop")
    job.wait(lambda: len(child.of("survive")) > before[1], COMMAND_TIMEOUT_S, "the survivor stops")
    steps = child.of("survive")[-1]["steps"]

    # Only the second half of the survivor's time alone: in the first half it may still wait for the group of
    # the previous round.
    alone = [
        end - begin
        for begin, end, *_ in steps
        if joined["began"] - ALONE_S / 2 < begin and end < joined["began"]
    ]
    during = [end - begin for begin, end, *_ in steps if joined["began"] <= end <= joined["settled"]]
    lost = sum(not ok for _, end, ok, _ in steps if joined["began"] <= end <= joined["settled"])
    if not alone or not during:
        raise RuntimeError(
            f"the survivor made {len(alone)} steps before and {len(during)} while the other joined"
        )
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


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for state, lengths in sorted(result.items(), key=lambda item: int(item[0].split()[0])):
        for compute_ms, sides in lengths.items():
            stalls, heals = (
                [Spread(**sides[name][key]) for name in (ours, upstream)] for key in ("stall", "heal")
            )
            goal = verdict(stalls[0].median <= GOAL_MS)
            times = [
                f"{stalls[0].text(0)} {goal}",
                stalls[1].text(0),
                *(spread.middle(0) for spread in heals),
            ]
            rows.append([state, compute_ms, *times])
    longer = f"step longer by, ms: {ours} (goal <= {GOAL_MS:g})"
    return markdown_table(["state", "compute, ms", longer, upstream, f"heal, ms: {ours}", upstream], rows)
