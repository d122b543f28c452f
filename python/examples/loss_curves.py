"""The loss of each replica group over the steps of a job, as a picture; needs matplotlib."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replica_group import Group

SMOOTHED = 10  # steps that a point of the curve is the mean of


def draw(groups: list[Group], kills: list[float], path: Path) -> None:
    """Writes the picture; where a group was killed its curve has a mark, and a gap until it is back.

    Args:
        groups: of a job that has ended.
        kills: when the last of them was killed, by the wall clock.
        path: of the picture, its ending says the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for group in groups:
        points = [(e["step"], e["loss"], e["time"]) for e in group.commits()]
        lives = [0.0, *kills, float("inf")] if group is groups[-1] else [0.0, float("inf")]
        colour = f"C{group.number}"
        for i, (begin, end) in enumerate(pairwise(lives)):
            life = [(step, loss) for step, loss, time in points if begin <= time < end]
            if not life:
                continue
            steps, losses = [step for step, _ in life], smoothed([loss for _, loss in life])
            axes.plot(steps, losses, color=colour, label=f"group {group.number}" if i == 0 else None)
            if end != float("inf"):
                axes.plot(steps[-1], losses[-1], "x", color=colour, markersize=10, label="killed" if i == 0 else None)
    axes.set(xlabel="step", ylabel="training loss", title="Loss of each replica group")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def smoothed(values: list[float]) -> list[float]:
    """Each value as the mean of itself and those before it, at most SMOOTHED."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - SMOOTHED) : i + 1])]
