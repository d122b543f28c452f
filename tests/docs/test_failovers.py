"""The table of failovers in the operating guide is the one that a test of the lighthouse's rule makes."""

from __future__ import annotations

from documents import ROOT


def test_the_table_of_failovers_is_what_the_rule_says() -> None:
    table = (ROOT / "go" / "quorum" / "testdata" / "failovers.md").read_text()
    assert table in (ROOT / "docs" / "operating.md").read_text()
