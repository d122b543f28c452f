"""The table of failovers in the operating guide is what a test of the lighthouse's rule makes; no page has another."""

from __future__ import annotations

from documents import ROOT

TABLE = (ROOT / "go" / "quorum" / "testdata" / "failovers.md").read_text()


def test_the_table_of_failovers_is_what_the_rule_says() -> None:
    assert TABLE in (ROOT / "docs" / "operating.md").read_text()


def test_no_page_has_another_table_of_failovers() -> None:
    row = next(line for line in TABLE.splitlines() if line.startswith("| 2 |"))
    begins = row[: row.index(",")]  # a row that says how many may end
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        assert text.count(begins) == text.count(TABLE), page
