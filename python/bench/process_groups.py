"""The cost of a process group: an operation of 16 floats, an allreduce of 25 MB, new peers, and an abort.

Two ranks as processes, Gloo on loopback. The groups are PyTorch's own, its reconfigurable one (native), and
the in-process and isolated groups of both packages; ours also with tensors in a shared buffer, like the
buckets of DistributedDataParallel. The processes of all groups exist at the same time, and the groups take
turns.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated, verdict
from processes import Job, JobFailed, free_port

WORKER = Path(__file__).resolve().parent / "process_group_worker.py"
COMMAND_TIMEOUT_S = 180
MB_25 = 25 * 2**20 // 4
SMALL, SMALL_COUNT = 16, 200
BIG_COUNT = 5
# Aborts and new peers are measured in the last rounds: where an abort has no effect, both take half a minute
# and may leave threads behind.
SLOW_ROUNDS = 5
ATTEMPTS = 3
DISPATCH_GOAL, BIG_GOAL, RECONFIGURE_GOAL_MS, ABORT_GOAL_MS = 1.5, 1.05, 300.0, 100.0

PLAIN = "plain PyTorch"
SHARED = "isolated, shared buffer"
_meetings = itertools.count()


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return, per package and kind of group, times in milliseconds and their ratio to plain PyTorch's
    in the same round.
    """
    kinds = {
        (PLAIN, "plain"): ours,
        (ours.name, "gloo"): ours,
        (ours.name, "isolated"): ours,
        (ours.name, SHARED): ours,
        (ours.name, "native"): ours,
        (upstream.name, "gloo"): upstream,
        (upstream.name, "isolated"): upstream,
    }
    samples: dict[tuple[str, str], dict[str, list[float]]] = {}

    def keep(key: tuple[str, str], figures: dict[str, float]) -> None:
        for what, ms in figures.items():
            samples.setdefault(key, {}).setdefault(what, []).append(ms)

    with Job() as job:
        progress("process groups: starting 4 processes")

        def start(side: Side) -> Workers:
            return _start(job, side, [kind for (_, kind), of in kinds.items() if of is side])

        sides = {side.name: start(side) for side in (ours, upstream)}

        for number in range(rounds):
            for key in rotated(list(kinds), number):
                side = kinds[key]
                for _ in range(ATTEMPTS):
                    try:
                        figures = _fast(sides[side.name], key[1])
                        if number >= rounds - SLOW_ROUNDS:
                            progress(f"process groups: {side.name} {key[1]}: new peers and an abort")
                            figures.update(_slow(sides[side.name], key[1]))
                        keep(key, figures)
                        break
                    except JobFailed as e:
                        if side is ours:
                            raise
                        # Some groups cannot be used after an abort; the measurement is then retried with new
                        # processes.
                        progress(f"process groups: {side.name} failed at {key[1]}: {str(e).splitlines()[0]}")
                        for child in sides[side.name].children:
                            child.kill()
                        sides[side.name] = start(side)
            progress(
                f"process groups, round {number + 1}/{rounds}: "
                + ", ".join(
                    f"{name} {kind} {1000 * s['dispatch'][-1]:.0f} µs" for (name, kind), s in samples.items()
                )
            )
    plain = samples[PLAIN, "plain"]
    return {
        name + "/" + kind: {
            what: {
                "ms": vars(Spread.of(values)),
                "ratio": vars(Spread.of(a / b for a, b in zip(values, plain[what]))),
            }
            for what, values in mine.items()
        }
        for (name, kind), mine in samples.items()
    }


def _start(job: Job, side: Side, kinds: list[str]) -> Workers:
    """Start two ranks, connect their groups of these kinds, and warm them up."""
    env = {"PEERS_PORT": str(free_port())}
    workers = Workers(
        job,
        [
            job.python(f"{side.name}-{r}", WORKER, path=side.path, env={**env, "RANK": str(r)})
            for r in range(2)
        ],
    )
    job.wait(
        lambda: all(c.of("imported") for c in workers.children), START_TIMEOUT_S, f"{side.name} is imported"
    )
    for kind in kinds:
        workers.do(START_TIMEOUT_S, do="make", kind=kind)
        _connect(workers, kind)
        workers.do(COMMAND_TIMEOUT_S, do="repeat", kind=kind, count=20, floats=SMALL)
    return workers


def _connect(workers: Workers, kind: str) -> float:
    answers = workers.do(COMMAND_TIMEOUT_S, do="connect", kind=kind, meeting=f"meeting/{next(_meetings)}")
    return max(answer["ms"] for answer in answers)


def _fast(workers: Workers, kind: str) -> dict[str, float]:
    def median(count: int, floats: int) -> float:
        answers = workers.do(COMMAND_TIMEOUT_S, do="repeat", kind=kind, count=count, floats=floats)
        return Spread.of(ms for answer in answers for ms in answer["ms"]).median

    return {"dispatch": median(SMALL_COUNT, SMALL), "25 MB": median(BIG_COUNT, MB_25)}


def _slow(workers: Workers, kind: str) -> dict[str, float]:
    figures = {
        "new peers": _connect(workers, kind),
        "abort": workers.do(COMMAND_TIMEOUT_S, do="abort", kind=kind)[0]["ms"],
    }
    # New peers after an abort: includes the time to recover from it.
    figures["new peers after it"] = _connect(workers, kind)
    return figures


def _cell(figures: dict[str, Any], ours: bool, what: str, unit: str, digits: int, goal: float) -> str:
    if what not in figures:  # an earlier measurement failed
        return ""
    spread = Spread(**figures[what][unit])
    return f"{spread.text(digits)} {verdict(spread.median <= goal)}" if ours else spread.middle(digits)


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    head = ["package", "group"]
    head += [f"16 floats, ratio to plain (goal <= {DISPATCH_GOAL:g})", f"25 MB, ratio (goal <= {BIG_GOAL:g})"]
    head += [f"new peers, ms (goal <= {RECONFIGURE_GOAL_MS:g})", f"abort, ms (goal <= {ABORT_GOAL_MS:g})"]
    rows = []
    for key, figures in sorted(result.items()):  # sorted, because the kinds were measured in rotating order
        name, _, kind = key.rpartition("/")
        cell = partial(_cell, figures, name == ours)

        rows.append(
            [
                name,
                kind,
                cell("dispatch", "ratio", 2, goal=DISPATCH_GOAL),
                cell("25 MB", "ratio", 2, goal=BIG_GOAL),
                cell("new peers", "ms", 1, goal=RECONFIGURE_GOAL_MS),
                cell("abort", "ms", 1, goal=ABORT_GOAL_MS),
            ]
        )
    return markdown_table(head, rows)
