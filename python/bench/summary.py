"""The table of docs/comparison.md: one line of each part that has been measured. `run.py` writes it after each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import markdown_table

# What a line is about, the part that it is of, and how to read one side's figure. What was not measured has no line.
LINES: list[tuple[str, str, Callable[[dict[str, Any], str], str]]] = [
    ("a step of one rank that computes nothing", "step", lambda f, s: f"{f['1']['ms'][s]['step']['median']:.2f} ms"),
    ("the same, four ranks a group", "step", lambda f, s: f"{f['4']['ms'][s]['step']['median']:.2f} ms"),
    (
        "throughput of DistributedDataParallel, as a share of plain PyTorch's",
        "throughput",
        lambda f, s: f"{f['share_of_plain'][s]['median']:.2f}",
    ),
    (
        "from `kill -9` to the survivor's next commit, two groups",
        "recovery",
        lambda f, s: f"{f['kill, 2 groups, plain']['sides'][s]['seconds']['median']:.2f} s",
    ),
    (
        "the same after SIGSTOP",
        "recovery",
        lambda f, s: f"{f['stop, 2 groups, plain']['sides'][s]['seconds']['median']:.2f} s",
    ),
    (
        "throughput kept while one of four groups dies every 10 s (join timeout 10 s)",
        "churn",
        lambda f, s: f"{f['10'][s]['share']:.2f}",
    ),
    (
        "longest step of a survivor while a group of 50 MB joins, beyond the usual",
        "heal_stall",
        lambda f, s: f"{f['0'][s]['stall']['median']:.0f} ms",
    ),
    ("start of the lighthouse", "startup", lambda f, s: f"{f['seconds'][s]['median']:.2f} s"),
    ("its memory then", "startup", lambda f, s: f"{f['mb'][s]['median']:.0f} MB"),
]


def table(figures: dict[str, Any], ours: str) -> str:
    """Return the lines of all parts in ``figures`` (as benchmarks.json holds them), as Markdown."""
    rows = []
    for what, part, read in LINES:
        if part in figures:
            sides = [_read(read, figures[part], side) for side in (ours, figures[part]["published"])]
            if any(sides):
                rows.append([f"{what} ([{part}](benchmarks.md))", *sides])
    return markdown_table(["", "ours", "published"], rows)


def _read(read: Callable[[dict[str, Any], str], str], figures: dict[str, Any], side: str) -> str:
    try:
        return read(figures, side)
    except KeyError:
        return ""  # this side, or this case, was not measured
