"""The steps of a job while its lighthouse is stopped, and while it is killed.

Two jobs train at the same time, each with a lighthouse of its own: two groups, Managers with Gloo, 50 ms of
computing and an allreduce of 1 MB a step. The lighthouse of one job is stopped with SIGSTOP and continued,
then killed with SIGKILL and restarted with its state. Nothing happens to the other job: its steps in the same
seconds show what the machine itself scatters by. A step belongs to an absence if it lasts into it, or begins
at most 10 s after it. On a busy machine all of it needs real-time priority, as the second command gives.

    python python/bench/lighthouse_away.py
    chrt -f 5 python python/bench/lighthouse_away.py --rounds 5
    python python/bench/lighthouse_away.py --rounds 1 --stopped 5 --down 3
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from common import START_TIMEOUT_S, Side, markdown_table, start_groups
from processes import Child, Job, free_port, ours_path
from startup import CONSOLE_SCRIPT

GOAL = 1.2  # limit for the longest step of an absence, as a multiple of the median step
COMPUTE_MS = 50
FLOATS = 250_000
BACK_S = 10
COMMAND_TIMEOUT_S = 120
FAULT_FREE, AWAY = "no fault", "its lighthouse is away"


@dataclass(frozen=True)
class Step:
    """A step of a group, in time.monotonic(), which all processes share."""

    began: float
    ended: float
    committed: bool
    participants: int

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def lost(self) -> bool:
        return not self.committed or self.participants < 2


@dataclass(frozen=True)
class Absence:
    """The time from the fault of a lighthouse until it listened again."""

    case: str
    began: float
    ended: float


class Training:
    """A job of two groups with its own lighthouse."""

    def __init__(self, job: Job, name: str, folder: Path) -> None:
        self._job, self._name = job, name
        self._port = free_port()
        self._options = [
            "--min_replicas",
            "2",
            "--bind",
            f"127.0.0.1:{self._port}",
            "--state_dir",
            str(folder),
        ]
        self.start_lighthouse()
        self._groups = start_groups(job, Side(name, ours_path()), 2, 1)
        self._groups.do(COMMAND_TIMEOUT_S, do="tensor", floats=FLOATS)
        self._groups.do(START_TIMEOUT_S, do="manager", lighthouse=f"http://127.0.0.1:{self._port}")
        self._groups.do(COMMAND_TIMEOUT_S, do="steps", count=20)
        self._send(do="survive", compute_ms=COMPUTE_MS)

    def start_lighthouse(self) -> None:
        """Start the lighthouse, with the state of the one before, and wait until it listens."""
        argv = [sys.executable, CONSOLE_SCRIPT, *self._options]
        self.lighthouse: Child = self._job.start(f"lighthouse of {self._name}", argv, path=ours_path())
        self._job.wait(self._listens, START_TIMEOUT_S, f"{self._name}: the lighthouse listens")

    def stop(self) -> list[Step]:
        """End the training, and return the steps of both groups."""
        self._send(do="stop")
        self._send(do="leave")  # a group that has begun one more step would wait for the other one
        children = self._groups.children
        self._job.wait(
            lambda: all(c.of("survive") for c in children),
            COMMAND_TIMEOUT_S,
            f"{self._name}: the groups stop",
        )
        return [Step(*step) for c in children for step in c.of("survive")[-1]["steps"]]

    def _send(self, **command: object) -> None:
        for child in self._groups.children:
            child.send(**command)

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True


def measure(stopped_s: float, down_s: float) -> tuple[list[Absence], dict[str, list[Step]]]:
    """Run both jobs. Return the absences, and each job's steps."""
    with Job() as job, tempfile.TemporaryDirectory(prefix="torchft-bench-") as folder:
        fault_free, away = (Training(job, name, Path(folder) / name) for name in (FAULT_FREE, AWAY))
        time.sleep(BACK_S)
        absences = []
        for case, seconds in (("stopped", stopped_s), ("killed", down_s)):
            lighthouse, began = away.lighthouse, time.monotonic()
            if case == "stopped":
                os.kill(lighthouse.pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(lighthouse.pid, signal.SIGCONT)
            else:
                lighthouse.kill()
                time.sleep(seconds)
                away.start_lighthouse()
            absences.append(Absence(f"{case}, {seconds:g} s", began, time.monotonic()))
            time.sleep(BACK_S)
        return absences, {FAULT_FREE: fault_free.stop(), AWAY: away.stop()}


def figures(steps: Iterable[Step], absence: Absence) -> dict[str, float]:
    """Return a job's figures in an absence: numbers of steps, and the longest ones as multiples of the
    median.
    """
    during = [s for s in steps if absence.began < s.ended and s.began < absence.ended]
    after = [s for s in steps if absence.ended <= s.began < absence.ended + BACK_S]
    median, longest = statistics.median(s.seconds for s in during), max(during, key=lambda s: s.seconds)
    return {
        "steps": len(during) + len(after),
        "lost": sum(s.lost for s in [*during, *after]),
        "longer": sum(s.seconds > GOAL * median for s in [*during, *after]),
        "median": 1000 * median,
        "while away": longest.seconds / median,
        "at s": longest.began - absence.began,
        "after it": max(s.seconds for s in after) / median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the steps of a job whose lighthouse is away.")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--stopped", type=float, default=60, help="seconds; default: %(default)s")
    parser.add_argument("--down", type=float, default=30, help="seconds; default: %(default)s")
    args = parser.parse_args()
    for name in ("rounds", "stopped", "down"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name):g}: allowed is 1 or more")
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(args.rounds):
        absences, jobs = measure(args.stopped, args.down)
        for absence in absences:
            for name, steps in jobs.items():
                rows.setdefault((absence.case, name), []).append(figures(steps, absence))
                shown = ", ".join(f"{key} {value:.4g}" for key, value in rows[absence.case, name][-1].items())
                print(f"round {number + 1}/{args.rounds}, {absence.case}, {name}: {shown}", flush=True)
    print(table(rows))


def table(rows: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    """Return the figures of all rounds as Markdown: medians, with the smallest and the largest."""

    def spread(rounds: list[dict[str, float]], key: str, digits: int) -> str:
        values = [figures[key] for figures in rounds]
        return f"{statistics.median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"

    lines = []
    for (case, name), rounds in rows.items():
        within = sum(max(figures["while away"], figures["after it"]) <= GOAL for figures in rounds)
        lines.append(
            [
                case,
                name,
                f"{sum(figures['steps'] for figures in rounds):g}",
                f"{sum(figures['lost'] for figures in rounds):g}",
                f"{sum(figures['longer'] for figures in rounds):g}",
                spread(rounds, "median", 1),
                spread(rounds, "while away", 2),
                spread(rounds, "after it", 2),
                f"{within} of {len(rounds)}",
            ]
        )
    head = [
        "lighthouse",
        "job",
        "steps",
        "lost",
        f"above {GOAL} medians",
        "median step, ms",
        "longest / median while away",
        f"in the {BACK_S} s after",
        f"rounds with none above {GOAL}",
    ]
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
