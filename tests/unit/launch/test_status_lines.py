"""The status lines of `torchft run`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchft.launch.job import Member
from torchft.launch.progress import Progress, line


def member(number: int, state: str) -> Member:
    group: Any = SimpleNamespace(number=number, starts=1)
    return Member(group, state=state)


def test_on_a_terminal_the_lines_replace_the_last_ones_also_if_they_are_wider_than_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the text would move up by a row each time, ten times a second."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    job: Any = SimpleNamespace(members=[member(0, "training"), member(1, "x" * 200)])
    assert 160 < len(line(job.members[1])) <= 240
    progress = Progress()
    progress.show(job)
    assert capsys.readouterr().out.count("A") == 0
    progress.show(job)
    assert capsys.readouterr().out.startswith("\x1b[4A"), "one row, and three rows"
