"""The status lines of `torchft run`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from torchft.launch.job import GroupState
from torchft.launch.progress import StatusLines, line
from torchft.launch.step_rate import StepRate


def member(number: int, state: str) -> GroupState:
    group: Any = SimpleNamespace(number=number, starts=1, started=time.time(), log="logs/group-0.log", pid=7)
    return GroupState(group, state=state)


def test_on_a_terminal_the_lines_replace_the_last_ones_also_if_they_are_wider_than_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the text would move up by a row each time, ten times a second."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    members = [member(0, "training"), member(1, "x" * 200)]
    job: Any = SimpleNamespace(members=members, pace=StepRate(), decision="")
    assert 160 < len(line(job.members[1], job.pace)) <= 240
    progress = StatusLines()
    progress.show(job)
    assert capsys.readouterr().out.count("A") == 0
    progress.show(job)
    assert capsys.readouterr().out.startswith("\x1b[4A"), "one row, and three rows"


@pytest.mark.parametrize(("terminal", "times"), [(True, 2), (False, 1)])
def test_a_decision_about_the_number_of_groups_is_shown(
    terminal: bool, times: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    job: Any = SimpleNamespace(
        members=[member(0, "training")], pace=StepRate(), decision="2 -> 3 groups: why"
    )
    progress = StatusLines()
    progress.show(job)
    progress.show(job)
    assert capsys.readouterr().out.splitlines().count("2 -> 3 groups: why") == times


def test_the_line_of_a_group() -> None:
    one, pace = member(0, "training"), StepRate()
    assert line(one, pace) == "group 0   step        0  training", (
        "a rate of 0 would say that it makes no step"
    )
    pace.look(0.0, 1, 0)
    pace.look(0.5, 1, 10)
    one.step = 10
    assert line(one, pace) == "group 0   step       10  training, 20.0 steps/s"
    one.state = "done"
    assert line(one, pace).split() == ["group", "0", "done"], "it has trained steps since that one"


@pytest.mark.parametrize(
    ("starts", "state", "expected"),
    [
        (1, "starting", "starting"),
        (2, "starting again", "starting again"),
        (3, "starting again", "starting again  (2 times)"),
        (2, "training", "training  (started again)"),
        (3, "training", "training  (started again 2 times)"),
    ],
)
def test_the_restarts_of_a_group_are_said_once(starts: int, state: str, expected: str) -> None:
    one = member(0, state)
    one.group.starts = starts
    assert line(one, StepRate()) == f"group 0   step        0  {expected}"


def test_a_group_that_hangs_at_its_start_names_its_log() -> None:
    one = member(0, "starting")
    assert line(one, StepRate()).endswith("  starting")
    one.group.started -= 31
    assert "  starting for 31 s, see logs/group-0.log; `py-spy dump -s --pid 7` shows where" in line(
        one, StepRate()
    )
    one.state = "waiting"
    assert line(one, StepRate()).endswith("  waiting")


def test_the_rate_of_steps_that_take_long() -> None:
    pace = StepRate()
    shown = []
    for second in range(121):
        pace.look(float(second), 1, min(second // 12, 4))  # the fifth step does not end
        shown.append(str(pace))
    assert set(shown[:12]) == {""} and set(shown[12:85]) == {"12.0 s/step"} and set(shown[85:]) == {""}


def test_a_rate_does_not_go_across_quorums() -> None:
    pace = StepRate()
    pace.look(0.0, 1, 0)
    pace.look(1.0, 2, 5000)  # a group with a checkpoint has joined
    assert str(pace) == ""
    pace.look(2.0, 2, 5010)
    assert str(pace) == "10.0 steps/s"
