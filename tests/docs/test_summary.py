"""The table of docs/comparison.md has what was measured, and is that of benchmarks.json."""

from __future__ import annotations

import json
import re
import sys

import pytest
from documents import ROOT

sys.path.append(str(ROOT / "python" / "bench"))

import summary

STEP = {"1": {"ms": {"ours": {"step": {"median": 1.0}}, "theirs": {"step": {"median": 2.5}}}}, "published": "theirs"}


@pytest.mark.parametrize(
    ("figures", "lines"),
    [
        ({}, []),
        (
            {"step": STEP},
            ["| a step of one rank that computes nothing ([step](benchmarks.md)) | 1.00 ms | 2.50 ms   |"],
        ),
    ],
)
def test_a_line_a_figure(figures: dict[str, object], lines: list[str]) -> None:
    assert summary.table(figures, "ours").splitlines()[2:] == lines


def test_the_page_has_the_figures_of_the_last_run() -> None:
    figures = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    assert summary.table(figures, "ours") in (ROOT / "docs" / "comparison.md").read_text()


def test_each_part_says_what_it_was_measured_against() -> None:
    figures = json.loads((ROOT / "docs" / "benchmarks.json").read_text())
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for part, measured in figures.items():
        assert re.fullmatch(r"torchft(-nightly)? [0-9.]+", measured["published"]), part
        table = page.partition(f"<!-- {part}: written by run.py -->")[2].partition("<!-- end of")[0]
        assert f"{measured['machine']}; against {measured['published']}, 20" in table, part
