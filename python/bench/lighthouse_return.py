"""The time without progress of a job whose lighthouse is killed with SIGKILL and restarted.

Each group requests a quorum and votes every 20 ms. The lighthouse is killed, and some seconds later restarted with its
persisted state. The time runs from the first connection that it accepts until every group has completed another step.
Quorum ids must rise across the restart.

    python python/bench/lighthouse_return.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import markdown_table, verdict
from lighthouses import cluster

LIMIT_S = 2.0


def measure(groups: int, kills: int, down_s: float) -> list[float]:
    """Kill the lighthouse ``kills`` times; return the seconds from each restart to the next step of all groups."""
    seconds = []
    with tempfile.TemporaryDirectory(prefix="torchft-bench-") as folder, cluster(Path(folder), groups=groups) as c:
        c.steps(10, members=groups)
        for number in range(kills):
            last = max(c.quorum_ids())
            began = len(c.members[0].of("step"))
            c.lighthouses[0].kill()
            time.sleep(down_s)
            c.lighthouses[0] = c.start_lighthouse(0)
            seconds.append(c.steps(1))
            c.steps(10, members=groups)
            later = [q for q in c.quorum_ids(began) if q != last]
            if not later or min(later) < last:
                raise SystemExit(f"quorum ids after the restart must be above {last}: {later}")
            print(f"{groups} groups, down {down_s:g} s, kill {number + 1}/{kills}: {seconds[-1]:.2f} s", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measure the time until a job continues after a restart of its lighthouse."
    )
    parser.add_argument("--kills", type=int, default=10, help="default: %(default)s")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills {args.kills}: allowed is 1 or more")
    rows = []
    for groups, down_s in ((2, 1.0), (2, 10.0), (8, 1.0)):
        took = measure(groups, args.kills, down_s)
        rows.append(
            [
                str(groups),
                f"{down_s:g} s",
                f"{statistics.median(took):.2f} s [{min(took):.2f}, {max(took):.2f}]",
                verdict(max(took) < LIMIT_S),
            ]
        )
    print("\n" + markdown_table(["groups", "down for", "until all groups step", f"within {LIMIT_S:g} s"], rows))


if __name__ == "__main__":
    sys.exit(main())
