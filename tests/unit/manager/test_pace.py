"""The times at which a group that trains along requests pieces."""

from __future__ import annotations

import pytest

from torchft._manager.pace import SHARE, Pace


def test_requests_follow_each_other_during_a_pass() -> None:
    pace = Pace()
    pace.quorum(10.0)
    pace.spent(10.0, 10.5)
    assert pace.pause(10.5) == 0


@pytest.mark.parametrize(
    ("in_pass", "then", "at", "pause"),
    [
        (0.0, 0.0, 10.0, 0.0),  # nothing was requested in the pass
        (0.0, 0.1, 10.1, 0.3),
        (0.1, 0.0, 10.1, 0.3),  # the pass has used the share of 0.4 s already
        (0.1, 0.1, 10.5, 0.3),
        (0.1, 0.1, 10.9, 0.0),
    ],
)
def test_after_the_pass_requests_take_what_it_has_left(in_pass: float, then: float, at: float, pause: float) -> None:
    pace = Pace()
    pace.quorum(10.0)
    pace.spent(10.0, 10.0 + in_pass)
    for reduced in (10.2, 10.4):
        pace.reduces(reduced)
    assert pace.overlap == pytest.approx(0.2)
    pace.spent(at - then, at)
    assert pace.pause(at) == pytest.approx(pause)


def test_a_quorum_ends_a_pause() -> None:
    """The request may have waited for the step of that quorum at its source, for example during an evaluation."""
    pace = Pace()
    pace.reduces(10.0)
    pace.spent(10.0, 40.0)
    pace.quorum(40.0)
    assert pace.pause(40.0) == 0
    pace.spent(39.0, 39.9)  # it had ended before the quorum
    pace.reduces(10.0)
    assert pace.pause(40.1) == 0
    pace.spent(10.0, 40.1)
    assert pace.pause(40.1) == pytest.approx(0.3)


def test_without_a_pass_a_fixed_part_of_the_time_is_spent() -> None:
    pace, now, spent = Pace(), 0.0, 0.0
    pace.quorum(now)
    pace.reduces(10.0)
    for number in range(1000):
        now += pace.pause(now)
        seconds = 0.001 * (1 + number % 7)
        pace.spent(now, now + seconds)
        now, spent = now + seconds, spent + seconds
    now += pace.pause(now)
    assert spent / now == pytest.approx(SHARE)
