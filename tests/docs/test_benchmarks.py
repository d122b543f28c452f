"""The figures in the documents are the measured ones."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from documents import ROOT

sys.path.append(str(ROOT / "python" / "bench"))

import common
import run

FIGURES: dict[str, Any] = json.loads((ROOT / "docs" / "internals" / "benchmarks.json").read_text())
# Minimum number of rounds of a median, except in rows marked as one run.
FEWEST_ROUNDS = {"recovery": 10}


def spreads(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, float]]]:
    if isinstance(value, dict) and "samples" in value:
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from spreads(item, f"{path}/{key}")


def written(part: str) -> str:
    """The table of a part on the page, with the line above it."""
    page = (ROOT / "docs" / "internals" / "benchmarks.md").read_text()
    return page.partition(f"<!-- {part}: written by run.py -->")[2].partition("<!-- end of")[0]


@pytest.mark.parametrize("part", FIGURES)
def test_each_row_has_the_rounds_that_it_promises(part: str) -> None:
    fewest = FEWEST_ROUNDS.get(part, common.FEWEST_SAMPLES)
    found = list(spreads(FIGURES[part]))
    assert found
    assert [(path, s["samples"]) for path, s in found if s["samples"] < fewest and s["samples"] != 1] == []
    assert FIGURES[part].get("rounds", fewest) >= fewest
    assert (written(part).count("(one run)") > 0) == any(s["samples"] == 1 for _, s in found)


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([2.0], "2.00 s (one run)"),
        ([1.0, 2.0, 3.0], "2.00 s (3 runs)"),
        ([1.0, 2.0, 3.0, 4.0, 5.0], "3.00 [1.40, 4.60] s"),
    ],
)
def test_a_figure_of_few_runs_states_their_number(samples: list[float], text: str) -> None:
    assert common.Spread.of(samples).text(2, " s") == text


def test_every_part_was_measured() -> None:
    assert set(FIGURES) == set(run.PARTS)


@pytest.mark.parametrize("part", FIGURES)
def test_the_table_of_a_part_shows_its_figures(part: str) -> None:
    assert run.table(part, FIGURES[part]) in written(part)


@pytest.mark.parametrize("part", FIGURES)
def test_each_part_names_the_version_it_was_measured_with(part: str) -> None:
    measured = FIGURES[part]
    assert re.fullmatch(r"torchft(-nightly)? [0-9.]+", measured["upstream"])
    usual = re.split("[,;] ", written("machine").strip().removesuffix("."))
    *different, day = re.split("[,;] ", written(part).strip().partition("\n")[0])
    assert re.fullmatch(r"20\d\d-\d\d-\d\d\.", day)
    place = re.split("[,;] ", f"{measured['machine']}; against {measured['upstream']}")
    assert different == [piece for piece in place if piece not in usual]
    assert len(place) == len(usual)


def test_the_figures_of_the_summary_are_those_of_the_tables() -> None:
    """Each number with a point, or in ms, of the second and third cells is in a table; goals are not read."""
    pages = ("benchmarks.md", "scaling.md", "gpu.md")
    tables = "".join((ROOT / "docs" / "internals" / page).read_text() for page in pages)
    rows = re.findall(r"^\| [^|]+ \| (.*) \|$", (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE)
    figures = {
        figure for row in rows for figure in re.findall(r"(?<!goal )(?<![\d.])\d+\.\d+|\d+(?= ms)", row)
    }
    assert len(figures) > 20
    assert {f for f in figures if not re.search(rf"(?<![\d.]){re.escape(f)}(?![.\d]*\d)", tables)} == set()
