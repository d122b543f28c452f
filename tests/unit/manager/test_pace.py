"""The times at which a group that trains along requests pieces."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from torchft._manager.heal.pace import LEAST, MORE, START, Pace, TimeShare


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
def test_after_the_pass_requests_take_what_it_has_left(
    in_pass: float, then: float, at: float, pause: float
) -> None:
    pace = Pace()
    pace.quorum(10.0)
    pace.spent(10.0, 10.0 + in_pass)
    for reduced in (10.2, 10.4):
        pace.reduces(reduced)
    assert pace.overlap == pytest.approx(0.2)
    pace.spent(at - then, at)
    assert pace.pause(at) == pytest.approx(pause)


def test_a_quorum_ends_a_pause() -> None:
    """The request may have waited for the step of that quorum at its source, for example during an
    evaluation.
    """
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
    assert spent / now == pytest.approx(START)


def quiet_step(pace: Pace) -> None:
    for number in range(4):
        assert not pace.share.quiet
        pace.quorum(10.0 + number)
    assert pace.share.quiet


def test_nothing_is_requested_in_a_quiet_step() -> None:
    pace = Pace()
    quiet_step(pace)
    assert pace.pause(13.0) == pytest.approx(2.0), "not even in the pass"
    pace.quorum(14.0)
    assert not pace.share.quiet
    pace.reduces(14.0)
    assert pace.pause(14.0) == 0


def test_a_long_step_is_not_quiet_to_its_end() -> None:
    """For example with an evaluation after its vote."""
    pace = Pace()
    quiet_step(pace)
    assert pace.pause(14.0) == pytest.approx(1.0)
    assert pace.pause(15.0) == 0
    pace.spent(15.0, 100.0)
    pace.quorum(100.0)
    pace.quorum(101.0)
    assert pace.share.quiet and not pace.share._without, "the next but one is"


@pytest.mark.parametrize("seconds", [0.04, 0.5])
def test_a_step_into_which_a_request_reaches_is_not_measured(seconds: float) -> None:
    pace = Pace()
    quiet_step(pace)
    pace.spent(12.0, 13.0 + seconds)
    pace.quorum(14.0)
    assert len(pace.share._without) == (seconds < 0.05) and not pace.share.quiet


def test_at_the_least_share_a_pass_has_pauses() -> None:
    pace = Pace()
    pace.share.value = LEAST
    pace.quorum(10.0)
    pace.spent(10.0, 10.1)
    assert pace.pause(10.1) == pytest.approx(0.9)


# The duration of a step, from the share of requests in it and its number.
Step = Callable[[float, int], float]


def after(step: Step, steps: int) -> TimeShare:
    share = TimeShare()
    for number in range(steps):
        share.step(step(0.0 if share.quiet else share.value, number))
    return share


@pytest.mark.parametrize(
    ("step", "steps", "least", "most"),
    [
        pytest.param(lambda share, number: 0.5, 5, START, START, id="nothing known"),
        pytest.param(lambda share, number: 0.5, 6, 2 * START, 2 * START, id="doubled"),
        pytest.param(lambda share, number: 0.5, 9, 1.0, 1.0, id="no cost"),
        pytest.param(lambda share, number: 0.5 * (1 + 0.04 * share), 100, 1.0, 1.0, id="little cost"),
        pytest.param(
            lambda share, number: 0.5 * (1 + 0.1 * share), 100, 0.25, 0.5 + MORE, id="half is too much"
        ),
        pytest.param(lambda share, number: 0.5 * (1 + share), 100, LEAST, LEAST, id="any share costs"),
        pytest.param(lambda share, number: 0.5 + 9 * (number % 7 == 5), 60, 1.0, 1.0, id="some long steps"),
        pytest.param(lambda share, number: 0.5 if number < 50 else 5.0, 100, 0.5, 1.0, id="longer for good"),
        pytest.param(lambda share, number: 5.0 if number < 50 else 0.5, 100, 1.0, 1.0, id="shorter for good"),
        pytest.param(
            lambda share, number: (5.0 if number < 50 else 0.5) * (1 + 0.4 * share),
            *(100, LEAST, 0.25),
            id="shorter for good, with a cost",
        ),
        pytest.param(lambda share, number: 0.001 * (1 + 0.5 * share), 100, 1.0, 1.0, id="very short steps"),
        pytest.param(lambda share, number: 0.0, 100, 1.0, 1.0, id="no time"),
    ],
)
def test_the_share_is_adapted_to_the_cost(step: Step, steps: int, least: float, most: float) -> None:
    assert least <= after(step, steps).value <= most


@pytest.mark.parametrize(("cost", "least", "most"), [(0.0, 0.6, 1.0), (0.8, LEAST, 0.3)])
def test_the_share_is_adapted_in_noise(cost: float, least: float, most: float) -> None:
    """Steps that scatter by a tenth."""
    rng, values = random.Random(1), []
    share = TimeShare()
    for _ in range(3000):
        share.step((1 + (0.0 if share.quiet else cost * share.value)) * rng.gauss(0.5, 0.05))
        values.append(share.value)
    assert least <= sum(values) / len(values) <= most


def test_few_steps_are_quiet() -> None:
    share = TimeShare()
    quiet = []
    for _ in range(100):
        quiet.append(share.quiet)
        share.step(0.5)
    assert quiet[:6] == [False, False, False, True, False, True]
    assert sum(quiet) <= 14
    assert not any(one and other for one, other in itertools.pairwise(quiet))
