"""The time from the start of a joining group to its first commit, and the survivor's longest step, for a
model with Adam.

One group trains alone; a second one makes its Manager, heals weights and Adam's state from it, and commits.
Both run with the defaults of their package (asynchronous quorum, HTTP), in processes that are new each time.
The joining group has a model with other weights, and an optimizer that has not stepped yet. Steps compute
nothing, so that they do not hide the transfer.

    python python/bench/heal_model.py --rounds 5
"""

from __future__ import annotations

import argparse
import mmap
import time
from typing import Any

from common import (
    START_TIMEOUT_S,
    Side,
    Spread,
    Workers,
    fetch_memory,
    markdown_table,
    rotated,
    start_groups,
    verdict,
)
from processes import Job, ours_path
from upstream import REQUIREMENTS, install

STATE_MB = 1500
FREE_MB = 7000  # upstream needs 4.5 GB beside the states
GOALS = {"committed": 0.4, "longest": 0.2}
ALONE_S = 2.0
SETTLE = 12  # steps in which both groups train afterwards
COMMAND_TIMEOUT_S = 120

Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a group takes to heal a model with Adam.")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--upstream", choices=sorted(REQUIREMENTS), default="nightly")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: allowed is 1 or more")
    upstream = Side(REQUIREMENTS[args.upstream].replace("==", " "), install(args.upstream))
    ours = Side("ours", ours_path())
    print(tables(measure(ours, upstream, args.rounds), ours.name, upstream.name))


def measure(ours: Side, upstream: Side, rounds: int) -> dict[str, Any]:
    """Return, per side, the seconds to the first commit and the survivor's longest step, and the
    ratios within a round.
    """
    rows: dict[str, list[Row]] = {ours.name: [], upstream.name: []}
    for number in range(rounds):
        for side in rotated((ours, upstream), number):
            rows[side.name].append(_round(side))
        latest = [
            f"{n} {r[-1]['committed']:.2f} s, longest {r[-1]['longest']:.2f} s" for n, r in rows.items()
        ]
        print(f"round {number + 1}/{rounds}: {', '.join(latest)}", flush=True)
    both = list(zip(rows[ours.name], rows[upstream.name]))
    return {
        "seconds": {
            name: {key: vars(Spread.of(row[key] for row in mine)) for key in mine[0]}
            for name, mine in rows.items()
        },
        "ratio": {key: vars(Spread.of(a[key] / b[key] for a, b in both)) for key in GOALS},
    }


def _round(side: Side) -> Row:
    with Job() as job:
        _, address = job.lighthouse(side.path, min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000)
        both = start_groups(job, side, 2, 1).children
        survivor, newcomer = Workers(job, both[:1]), Workers(job, both[1:])
        survivor.do(START_TIMEOUT_S, do="adam", mb=STATE_MB, trained=True)
        newcomer.do(START_TIMEOUT_S, do="adam", mb=STATE_MB, trained=False)
        survivor.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        child = survivor.children[0]
        child.send(do="survive", compute_ms=0)
        job.wait(lambda: child.of("surviving"), COMMAND_TIMEOUT_S, "the survivor trains")
        time.sleep(ALONE_S)
        fetch_memory(FREE_MB * 1_000_000 // mmap.PAGESIZE * mmap.PAGESIZE)
        joined = newcomer.do(COMMAND_TIMEOUT_S, do="join", lighthouse=address, settle=SETTLE, compute_ms=0)[0]
        newcomer.do(COMMAND_TIMEOUT_S, do="leave")
        child.send(do="stop")
        job.wait(lambda: child.of("survive"), COMMAND_TIMEOUT_S, "the survivor stops")
        steps = child.of("survive")[-1]["steps"]
    if joined["healed"] < joined["made"]:
        raise RuntimeError("the newcomer trained without being healed")
    during = [end - begin for begin, end, *_ in steps if joined["began"] <= end <= joined["settled"]]
    return {"committed": joined["committed"] - joined["began"], "longest": max(during)}


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for name in (ours, upstream):
        cells = [name]
        for key, goal in GOALS.items():
            cells.append(Spread(**result["seconds"][name][key]).text())
            ratio = Spread(**result["ratio"][key])
            cells.append(
                f"{ratio.text()} (goal <= {goal:g}: {verdict(ratio.median <= goal)})" if name == ours else ""
            )
        rows.append(cells)
    return markdown_table(
        ["package", "Manager to first commit, s", "ratio", "survivor's longest step, s", "ratio"], rows
    )


if __name__ == "__main__":
    main()
