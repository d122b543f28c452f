"""The times at which a group that trains along requests pieces."""

from __future__ import annotations

import pytest

from torchft._manager.pace import PAUSE, Pace


def test_requests_follow_each_other_during_a_pass() -> None:
    pace = Pace()
    pace.quorum()
    pace.spent(10.0, 10.5)
    assert pace.pause(10.5) == 0
    pace.reduces(10.5)
    assert pace.pause(10.5) == 0


def test_each_request_is_followed_by_a_pause_from_the_first_reduction_on() -> None:
    pace = Pace()
    pace.quorum()
    pace.reduces(9.0)
    pace.reduces(9.5)
    pace.spent(10.0, 10.5)
    assert pace.pause(10.5) == PAUSE * 0.5
    assert pace.pause(10.5 + PAUSE * 0.5) == 0


def test_the_part_of_a_request_in_the_pass_causes_no_pause() -> None:
    pace = Pace()
    pace.quorum()
    pace.reduces(10.4)
    pace.reduces(10.45)
    pace.spent(10.0, 10.5)
    assert pace.pause(10.5) == pytest.approx(PAUSE * 0.1)


def test_pauses_add_up() -> None:
    """The answer is processed during the pause after its request."""
    pace = Pace()
    pace.spent(10.0, 10.5)
    pace.spent(10.5, 10.6)
    assert pace.pause(10.6) == pytest.approx(PAUSE * 0.6 - 0.1)


def test_a_quorum_ends_a_pause() -> None:
    """The request may have waited for the step of that quorum at its source, for example during an evaluation."""
    pace = Pace()
    pace.reduces(10.0)
    pace.spent(10.0, 40.0)
    pace.quorum()
    assert pace.pause(40.0) == 0
    pace.reduces(40.1)
    assert pace.pause(40.1) == 0


def test_outside_of_passes_a_fixed_part_of_the_time_is_spent() -> None:
    pace, now, spent = Pace(), 0.0, 0.0
    for number in range(1000):
        now += pace.pause(now)
        seconds = 0.001 * (1 + number % 7)
        pace.spent(now, now + seconds)
        now, spent = now + seconds, spent + seconds
    now += pace.pause(now)
    assert spent / now == pytest.approx(1 / (1 + PAUSE))
