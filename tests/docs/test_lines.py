"""The pages state the actual number of lines of each layer."""

from __future__ import annotations

import re

import pytest
from documents import ROOT

SAID = re.compile(r"`((?:torchft|go)/[\w/.]+)` has about ([\d,]+)")


@pytest.mark.parametrize("page", ["ftlib", "dlrover"])
def test_lines(page: str) -> None:
    found = SAID.findall((ROOT / f"docs/{page}.md").read_text())
    assert len(found) >= 2
    for path, stated in found:
        there = ROOT / path
        files = [there] if there.is_file() else [*there.rglob("*.py"), *there.rglob("*.go")]
        lines = sum(file.read_text().count("\n") for file in files if not file.name.endswith("_test.go"))
        assert lines == pytest.approx(int(stated.replace(",", "")), rel=0.1), path
