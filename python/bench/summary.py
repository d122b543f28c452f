"""The table of docs/comparison.md: one line of each part that has been measured. `run.py` writes it after each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import Spread, markdown_table


def _spread(digits: int, unit: str, *path: str) -> Callable[[dict[str, Any], str], str]:
    """Return what reads the figure at this path, in which "SIDE" stands for the side's name."""

    def read(figures: dict[str, Any], side: str) -> str:
        value: Any = figures
        for key in path:
            value = value[side if key == "SIDE" else key]
        return Spread(**value).text(digits, unit)

    return read


def _recovery(case: str) -> Callable[[dict[str, Any], str], str]:
    return _spread(2, " s", case, "sides", "SIDE", "seconds")


# What a line is about, the part that it is of, and how to read one side's figure. What was not measured has no line.
LINES: list[tuple[str, str, Callable[[dict[str, Any], str], str]]] = [
    ("a step of one rank that computes nothing", "step", _spread(2, " ms", "1", "ms", "SIDE", "step")),
    ("the same, four ranks a group", "step", _spread(2, " ms", "4", "ms", "SIDE", "step")),
    *(
        (
            "throughput of DistributedDataParallel as a share of plain PyTorch's with the same settings, "
            f"`gradient_as_bucket_view={views}`",
            "throughput",
            _spread(2, "", "gradient_as_bucket_view", views, "SIDE", "share_of_plain"),
        )
        for views in ("True", "False")
    ),
    (
        "from `kill -9` to the survivor's next commit, two groups (heartbeat timeout 5 s)",
        "recovery",
        _recovery("kill, 2 groups, plain"),
    ),
    ("the same after SIGSTOP (timeout of a collective 30 s)", "recovery", _recovery("stop, 2 groups, plain")),
    *(
        (
            f"throughput kept while one of four groups is killed every 10 s (join timeout {seconds} s)",
            "churn",
            _spread(2, "", seconds, "SIDE", "share"),
        )
        for seconds in ("2", "10")
    ),
    *(
        (
            f"longest step of a survivor while a group with {state} of state joins, beyond the median",
            "heal_stall",
            _spread(0, " ms", state, "0", "SIDE", "stall"),
        )
        for state in ("50 MB", "1000 MB", "4000 MB")
    ),
    ("start of the lighthouse", "startup", _spread(2, " s", "seconds", "SIDE")),
    ("its memory then", "startup", _spread(0, " MB", "mb", "SIDE")),
]


def table(figures: dict[str, Any], ours: str) -> str:
    """Return the lines of all parts in ``figures`` (as benchmarks.json holds them), as Markdown."""
    rows = []
    for what, part, read in LINES:
        if part in figures:
            sides = [_read(read, figures[part], side) for side in (ours, figures[part]["upstream"])]
            if any(sides):
                rows.append([f"{what} ([{part}](benchmarks.md))", *sides])
    return markdown_table(["", "ours", "upstream"], rows)


def _read(read: Callable[[dict[str, Any], str], str], figures: dict[str, Any], side: str) -> str:
    try:
        return read(figures, side)
    except KeyError:
        return ""  # this side, or this case, was not measured
