"""The loss of each replica group over the steps of a job, as a picture; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replica_group import Event, Group

SMOOTHED = 10  # number of steps that are averaged for a point of the curve


def draw(groups: list[Group], path: Path) -> None:
    """Writes the picture. When a group is killed, its curve has a mark, and a gap until the group returns.

    Args:
        groups: the groups of a job that has ended.
        path: file of the picture; its suffix determines the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for group in groups:
        color, name = f"C{group.number}", f"group {group.number}"
        found = [life for life in lives(group.events) if life]
        for i, life in enumerate(found):
            steps, losses = [event["step"] for event in life], smoothed([event["loss"] for event in life])
            axes.plot(steps, losses, color=color, label=name if i == 0 else None)
            if i < len(found) - 1:
                axes.plot(steps[-1], losses[-1], "x", color=color, label=f"{name} killed" if i == 0 else None)
    axes.set(xlabel="step", ylabel="training loss", title="Loss of each replica group")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def lives(events: list[Event]) -> list[list[Event]]:
    """The commits of a group from each of its starts to the next."""
    found: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            found.append([])
        # the loss of a healing group is that of its weights before the heal
        elif event["event"] == "commit" and not event.get("healing"):
            found[-1].append(event)
    return found


def smoothed(values: list[float]) -> list[float]:
    """Each value averaged with the values before it, at most SMOOTHED in all."""
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i + 1 - SMOOTHED) : i + 1])
    ]
