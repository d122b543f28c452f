"""What a process group costs: an operation of 16 floats, an allreduce of 25 MB, new peers, and an abort.

Two ranks as processes, Gloo on loopback. PyTorch's own group, its reconfigurable one (native), and of both packages the
group in the process and the isolated one. All are up at the same time and take turns.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated, verdict
from processes import Job, JobFailed, free_port

WORKER = Path(__file__).resolve().parent / "process_group_worker.py"
COMMAND_TIMEOUT_S = 180
MB_25 = 25 * 2**20 // 4
SMALL, SMALL_COUNT = 16, 200
BIG_COUNT = 5
DISPATCH_GOAL, BIG_GOAL, RECONFIGURE_GOAL_MS, ABORT_GOAL_MS = 1.5, 1.05, 300.0, 100.0

PLAIN = "plain PyTorch"
_meetings = itertools.count()


def measure(ours: Side, published: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return, per package and kind of group, times in milliseconds and their ratio to plain PyTorch's of that round."""
    kinds = {
        (PLAIN, "plain"): ours,
        (ours.name, "gloo"): ours,
        (ours.name, "isolated"): ours,
        (ours.name, "native"): ours,
        (published.name, "gloo"): published,
        (published.name, "isolated"): published,
    }
    samples: dict[tuple[str, str], dict[str, list[float]]] = {}
    with Job() as job:
        progress("process groups: starting 4 processes")
        sides = {side.name: _start(job, side) for side in (ours, published)}
        for key, side in kinds.items():
            sides[side.name].do(START_TIMEOUT_S, do="make", kind=key[1])
            _connect(sides[side.name], key[1])
            sides[side.name].do(COMMAND_TIMEOUT_S, do="repeat", kind=key[1], count=20, floats=SMALL)

        for number in range(rounds):
            for key in rotated(list(kinds), number):
                side = kinds[key]
                if side.name not in sides:
                    continue
                try:
                    figures = _round(sides[side.name], key[1])
                except JobFailed as e:
                    if side is ours:
                        raise
                    # It may not get over an abort on a busy machine. What it has shown until then counts.
                    progress(f"process groups: {side.name} gave up at {key[1]}: {str(e).splitlines()[0]}")
                    for child in sides.pop(side.name).children:
                        child.kill()
                    continue
                for what, ms in figures.items():
                    samples.setdefault(key, {}).setdefault(what, []).append(ms)
            progress(
                f"process groups, round {number + 1}/{rounds}: "
                + ", ".join(f"{name} {kind} {1000 * s['dispatch'][-1]:.0f} µs" for (name, kind), s in samples.items())
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


def _start(job: Job, side: Side) -> Workers:
    env = {"PEERS_PORT": str(free_port())}
    workers = Workers(
        job,
        [job.python(f"{side.name}-{r}", WORKER, path=side.path, env={**env, "RANK": str(r)}) for r in range(2)],
    )
    job.wait(lambda: all(c.of("imported") for c in workers.children), START_TIMEOUT_S, f"{side.name} is imported")
    return workers


def _connect(workers: Workers, kind: str) -> float:
    answers = workers.do(COMMAND_TIMEOUT_S, do="connect", kind=kind, meeting=f"meeting/{next(_meetings)}")
    return max(answer["ms"] for answer in answers)


def _round(workers: Workers, kind: str) -> dict[str, float]:
    def median(count: int, floats: int) -> float:
        answers = workers.do(COMMAND_TIMEOUT_S, do="repeat", kind=kind, count=count, floats=floats)
        return Spread.of(ms for answer in answers for ms in answer["ms"]).median

    figures = {
        "dispatch": median(SMALL_COUNT, SMALL),
        "25 MB": median(BIG_COUNT, MB_25),
        "new peers": _connect(workers, kind),
        "abort": workers.do(COMMAND_TIMEOUT_S, do="abort", kind=kind)[0]["ms"],
    }
    # The peers after an abort: also the time it takes to get away from it.
    figures["new peers after it"] = _connect(workers, kind)
    return figures


def tables(result: dict[str, Any], ours: str, published: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for key, figures in result.items():
        name, _, kind = key.rpartition("/")
        ms = {what: Spread(**figure["ms"]) for what, figure in figures.items()}
        ratio = {what: Spread(**figure["ratio"]) for what, figure in figures.items()}
        small = ms["dispatch"]
        micros = Spread(1000 * small.median, 1000 * small.p10, 1000 * small.p90, small.samples)
        goals = ["", "", "", ""]
        if name == ours:
            met = [
                ratio["dispatch"].median <= DISPATCH_GOAL,
                ratio["25 MB"].median <= BIG_GOAL,
                ms["new peers"].median <= RECONFIGURE_GOAL_MS,
                ms["abort"].median <= ABORT_GOAL_MS,
            ]
            bounds = (DISPATCH_GOAL, BIG_GOAL, RECONFIGURE_GOAL_MS, ABORT_GOAL_MS)
            goals = [f" (goal <= {bound:g}: {verdict(ok)})" for bound, ok in zip(bounds, met)]
        rows.append(
            [
                name,
                kind,
                micros.text(0),
                ratio["dispatch"].text() + goals[0],
                ms["25 MB"].text(1),
                ratio["25 MB"].text() + goals[1],
                ms["new peers"].text(1) + goals[2],
                ms["abort"].text(1) + goals[3],
                ms["new peers after it"].text(1),
            ]
        )
    head = [
        "package",
        "group",
        "16 floats, µs",
        "ratio to plain",
        "25 MB, ms",
        "ratio to plain",
        "new peers, ms",
        "abort until the waiter returns, ms",
        "new peers after it, ms",
    ]
    return markdown_table(head, rows)
