"""The time until members of FTLib agree on a view, after a process joined and after a kill -9.

    python python/bench/ftlib.py

Four processes on this machine agree on views, without training. Measured for each passive consensus: the time
from the first report of a joining process, and from the kill, until all members have the next view.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from common import Child, Job
from processes import ours_path

MEMBER = Path(__file__).with_name("ftlib_member.py")
_DEADLINE_S = 200.0


class Members:
    """The member processes by name, and their views."""

    def __init__(self, job: Job, consensus: str, folder: str) -> None:
        self._job, self._consensus, self._folder = job, consensus, folder
        self._now: dict[str, Child] = {}

    def start(self, name: str) -> float:
        """Return the seconds from the first report of a new member until all members have a view that
        contains it.
        """
        before = self._count("joins")
        where = self._folder
        if self._consensus == "gossip":
            where = ",".join(child.of("made")[0]["address"] for child in self._now.values())
        self._now[name] = self._job.python(
            name, MEMBER, self._consensus, name, where, path=ours_path(), env={"TORCHFT_HOST": "localhost"}
        )
        all_have = self._agree()
        joins = [child.of("joins")[before[other] :] for other, child in self._now.items() if other in before]
        return all_have - min((each[0]["at"] for each in joins if each), default=all_have)

    def kill(self, name: str) -> float:
        """Return the seconds from the kill until all other members have a view without the killed one."""
        killed = time.time()
        self._now.pop(name).kill()
        return self._agree() - killed

    def _agree(self) -> float:
        """Return when the last member received a view of exactly these members."""
        names = sorted(self._now)

        def views() -> list[dict]:
            last = [child.of("view")[-1:] for child in self._now.values()]
            return [each[0] for each in last if each and each[0]["names"] == names]

        def agreed() -> bool:
            found = views()
            return len(found) == len(names) and len({view["number"] for view in found}) == 1

        self._job.wait(agreed, _DEADLINE_S, f"{names} agree")
        return max(view["at"] for view in views())

    def _count(self, event: str) -> dict[str, int]:
        return {name: len(child.of(event)) for name, child in self._now.items()}


def measure(consensus: str, rounds: int) -> tuple[list[float], list[float]]:
    joins, losses = [], []
    names = ["m0", "m1", "m2", "m3"]
    with tempfile.TemporaryDirectory() as folder, Job() as job:
        members = Members(job, consensus, folder)
        for name in names:
            joined = members.start(name)
            joins += [joined] if name != names[0] else []
        for i in range(rounds):
            losses.append(members.kill(names[i % len(names)]))
            joins.append(members.start(names[i % len(names)]))
    return joins, losses


def spread(seconds: list[float]) -> str:
    return f"{min(seconds):.2f} to {max(seconds):.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="a kill and a start each")
    args = parser.parse_args()
    print("| consensus | a newcomer, from the first news of it | a kill -9 |\n|---|---|---|")
    for consensus in ("gossip", "shared_storage"):
        joins, losses = measure(consensus, args.rounds)
        print(f"| {consensus} | {spread(joins)} | {spread(losses)} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
