"""When a rank says that nothing is committed."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from torchft._manager.step.uncommitted import EVERY_S, NO_VOTE, STEPS, Uncommitted


@pytest.mark.parametrize(
    ("history", "said"),
    [
        # (steps, seconds for each, committed at the end) in a row; the steps after which the rank speaks
        ([(19, 1.0, True), (19, 1.0, True)], []),
        ([(20, 1.0, True)], [20]),
        ([(79, 1.0, True)], [20]),
        ([(80, 1.0, False)], [20, 80]),
        ([(60, 30.0, False)], [*range(20, 61, 2)]),  # at most once a minute
        ([(30, 100.0, False)], [*range(20, 31)]),
        ([(25, 1.0, True), (25, 1.0, False)], [20]),  # the second row is within the minute
        ([(25, 1.0, True), (70, 1.0, False)], [20, 25 + 55]),
    ],
)
def test_when_it_is_said(history: list[tuple[int, float, bool]], said: list[int]) -> None:
    uncommitted, now, count, found = Uncommitted(), 1000.0, 0, []
    for steps, seconds, ends in history:
        for _ in range(steps):
            now, count = now + seconds, count + 1
            if uncommitted.lost("why", now) is not None:
                found.append(count)
        if ends:
            uncommitted.steps = 0
    assert found == said


def test_what_is_said() -> None:
    uncommitted = Uncommitted()
    text: Any = None
    for number in range(STEPS):
        assert text is None
        text = uncommitted.lost(f"cause {number}", 3.0 * number)
    row = "NOTHING IS COMMITTED: {} steps in a row were computed and lost, in {} s; the last one: cause {}"
    assert text == row.format(20, 57, 19)
    assert uncommitted.lost("cause 20", 57 + EVERY_S - 0.1) is None
    assert uncommitted.lost("cause 21", 57 + EVERY_S) == row.format(22, 117, 21)


@pytest.mark.parametrize("votes", [True, False], ids=["lost", "without a vote"])
def test_a_manager_says_it_with_the_cause(fixture: Any, votes: bool, caplog: Any) -> None:
    manager = fixture.manager()
    for _ in range(STEPS + 1):
        manager.start_quorum()
        if votes:
            manager.report_error(ValueError("the loss is NaN"))
            assert not manager.should_commit()
        else:
            manager.wait_quorum()
    said = [r.getMessage() for r in caplog.records if "NOTHING IS COMMITTED" in r.getMessage()]
    assert len(said) == 1 and said[0].endswith("the loss is NaN" if votes else NO_VOTE)
    assert caplog.records and {r.levelno for r in caplog.records if r.getMessage() in said} == {
        logging.WARNING
    }


def test_a_commit_ends_the_row(fixture: Any, caplog: Any) -> None:
    manager = fixture.manager()
    for number in range(2 * STEPS):
        manager.start_quorum()
        if number != STEPS // 2:
            manager.report_error(ValueError("the loss is NaN"))
        assert manager.should_commit() == (number == STEPS // 2)
        said = [r for r in caplog.records if "NOTHING IS COMMITTED" in r.getMessage()]
        assert len(said) == (number >= STEPS // 2 + STEPS)
