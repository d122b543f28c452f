"""The picture in the README: the throughput of a job of four groups, one of which is killed and returns.

    python python/bench/recovery_picture.py docs/recovery-of-one.png

Steps of 100 ms on plain Gloo, a join timeout of 10 s, a heartbeat timeout of 1 s. The victim is killed with
SIGKILL and restarted at once. The picture shows for each committed step of the first group the number of
batches of all groups, divided by the step's duration.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from common import REPOSITORY, START_TIMEOUT_S, Side, start_group, start_groups
from processes import Job, free_port

GROUPS = 4
COMPUTE_MS = 100
CALM_S = 6.0
WAIT_S = 120


@dataclass(frozen=True)
class Step:
    """A committed step: the end times of it and of the previous commit in seconds, and its number of
    participants.
    """

    begin: float
    end: float
    groups: int


@dataclass(frozen=True)
class Run:
    steps: list[Step]
    killed: float

    @property
    def gap(self) -> float:
        """Return the seconds from the kill to the survivors' first commit."""
        return next(s.end for s in self.steps if s.end > self.killed and s.groups == GROUPS - 1) - self.killed

    @property
    def back(self) -> float:
        """Return when the victim participated again."""
        alone = self.killed + self.gap
        return next(s.begin for s in self.steps if s.begin >= alone and s.groups == GROUPS)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Kill one of four groups, and draw the throughput of the job."
    )
    parser.add_argument("picture", type=Path, help="path of the PNG file")
    args = parser.parse_args()
    run = measure()
    draw(run, args.picture)
    print(
        f"the others committed {run.gap:.2f} s after the kill, and all four {run.back - run.killed:.1f} s "
        "after it"
    )
    print(f"drawn in {args.picture}")
    return 0


def measure() -> Run:
    """Train, kill the last group, restart it, and train until it has participated again for a while."""
    side = Side("ours", REPOSITORY)
    with Job() as job:
        _, address = job.lighthouse(side.path, min_replicas=1, join_timeout_ms=10_000)
        everybody = start_groups(job, side, GROUPS, 1)
        everybody.do(START_TIMEOUT_S, do="state", mb=50)
        everybody.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        for child in everybody.children:
            child.send(do="survive", compute_ms=COMPUTE_MS)
        first, *_, victim = everybody.children
        job.wait(
            lambda: first.of("committed")[-1:] and first.of("committed")[-1]["participants"] == GROUPS,
            WAIT_S,
            "4",
        )
        time.sleep(CALM_S)

        victim.kill()
        killed = time.monotonic()
        (again,) = start_group(job, side, GROUPS - 1, 1, free_port())
        again.send(do="state", mb=50)
        again.send(do="manager", lighthouse=address)
        again.send(do="survive", compute_ms=COMPUTE_MS)
        job.wait(lambda: again.of("committed"), WAIT_S, "the killed group is back")
        time.sleep(CALM_S)

        survivors = everybody.children[:-1]
        for child in survivors:
            child.send(do="stop")
        again.expected_to_live = False
        job.wait(lambda: all(child.of("survive") for child in survivors), WAIT_S, "the groups stop")
        commits = [(end, groups) for _, end, ok, groups in first.of("survive")[-1]["steps"] if ok]
    steps = [Step(a, b, groups) for (a, _), (b, groups) in pairwise(commits)]
    # Leave out the start of the job and its end, where groups are missing, too.
    last = max(s.end for s in steps if s.groups == GROUPS)
    return Run([s for s in steps if killed - CALM_S <= s.begin and s.end <= last], killed)


def draw(run: Run, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    edges = [s.begin - run.killed for s in run.steps] + [run.steps[-1].end - run.killed]
    rates = [s.groups / (s.end - s.begin) for s in run.steps]
    others = [min(s.groups, GROUPS - 1) / (s.end - s.begin) for s in run.steps]
    figure, axes = pyplot.subplots(figsize=(9, 3.2))
    axes.stairs(rates, edges, fill=True, color="#f2a65a", label="the group that is killed")
    axes.stairs(others, edges, fill=True, color="#4c78a8", label="the three others")
    top = GROUPS * 1000 / COMPUTE_MS
    axes.set_ylim(0, top * 1.45)
    axes.set_xlim(edges[0], edges[-1])
    back = run.back - run.killed
    for when, height, side, text in (
        (run.gap / 2, 0.75 * top, "right", f"kill -9: the others commit again\n{run.gap:.2f} s later"),
        (
            back,
            top,
            "left",
            f"started again at once, it heals and is\nin the average again after {back:.1f} s",
        ),
    ):
        arrow = dict(arrowstyle="->", color="0.3")
        axes.annotate(text, (when, height), (when, top * 1.16), arrowprops=arrow, fontsize=9, ha=side)
    axes.set_ylabel("batches a second")
    axes.set_xlabel("seconds from the kill")
    axes.legend(loc="lower right", fontsize=8, framealpha=0.9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
