"""The picture in docs/healing.md: a group's steps while another one joins, `heal_along` off and
on.

    python python/bench/join_picture.py docs/join.png

The same job as in heal_along.py: 1 GB of weights and Adam's state at 200 MB/s, 100 ms of computation per
step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from heal_along import OURS, Join, measure

MB, RATE, COMPUTE_MS = 1000, 200, 100
MARGIN_S = 2.0  # seconds before the join; afterwards as long as the joining group stays


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Let a group join twice, and draw the steps of the other group."
    )
    parser.add_argument("picture", type=Path, help="path of the PNG file")
    args = parser.parse_args()
    runs = {case.name: measure(case, MB, RATE, COMPUTE_MS) for case in OURS}
    draw(runs, args.picture)
    for name, run in runs.items():
        print(f"{name}: {run.row()}")


def draw(runs: dict[str, Join], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, 1, sharex=True, sharey=True, figsize=(9, 4))
    for axes, (name, run) in zip(rows, runs.items(), strict=True):
        last = run.newcomer["steps"][-1][1]
        steps = [
            (a - run.began, b - run.began)
            for a, b, _ in run.survivor["steps"]
            if run.began - MARGIN_S <= a and b <= last
        ]
        counts = run.joined - run.began
        axes.axvspan(
            0,
            counts,
            color="#f2a65a",
            alpha=0.3,
            label=f"the other group heals, and counts after {counts:.0f} s",
        )
        edges = [steps[0][0], *(end for _, end in steps)]
        axes.stairs([end - begin for begin, end in steps], edges, fill=True, color="#4c78a8")
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_ylabel("seconds of a step")
        axes.legend(loc="upper right", fontsize=8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    rows[-1].set_xlabel("seconds from the first step of the group that joins")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
