"""The table of failovers in the operating guide is the one that a test of the lighthouse's rule generates. No other
page has such a table.
"""

from __future__ import annotations

from documents import ROOT

TABLE = (ROOT / "go" / "quorum" / "testdata" / "failovers.md").read_text()


def test_the_operating_guide_has_the_generated_table() -> None:
    assert TABLE in (ROOT / "docs" / "operating.md").read_text()


def test_no_page_has_another_table_of_failovers() -> None:
    row = next(line for line in TABLE.splitlines() if line.startswith("| 2 |"))
    begins = row[: row.index(",")]  # a row with the number of lighthouses that may fail
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        assert text.count(begins) == text.count(TABLE), page
