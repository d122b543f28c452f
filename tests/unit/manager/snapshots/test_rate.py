"""When a copy is due: so often that copies cost at most 1 % of the time."""

from __future__ import annotations

import random

import pytest

from tests.bounded import often
from torchft._manager.snapshots.rate import FIRST_SHARE, SHARE, Rate, interval


@pytest.mark.parametrize(
    ("step", "cost", "steps"),
    [
        (1.0, 0.0, 1),
        (1.0, 0.01, 1),
        (1.0, 0.0101, 2),
        (0.1, 0.5, 512),
        (10.0, 0.5, 8),
        (0.0, 1.0, 1 << 20),  # a clock that did not move
    ],
)
def test_interval(step: float, cost: float, steps: int) -> None:
    assert interval(step, cost) == steps


def test_the_first_copies_are_guessed_by_their_size_and_may_cost_more() -> None:
    rate = Rate()
    assert rate.next(1 << 30) == 1, "nothing is known of a step"
    rate.step(1.0, copied=False)
    assert rate.next(1 << 30) == interval(1.0, 1.0, FIRST_SHARE) == 32
    for _ in range(3):
        rate.copied(took=0.3, waited=0.1)
    assert rate.next(1 << 30) == interval(1.0, 0.3) == 32


def measured(step: float, with_copy: float, took: float, waited: float) -> Rate:
    rate = Rate()
    for _ in range(5):
        rate.step(step, copied=False)
        rate.step(with_copy, copied=True)
        rate.copied(took, waited)
    return rate


@pytest.mark.parametrize(
    ("with_copy", "cost"),
    [
        (1.0, 0.001),  # in the background of a device: what the training thread has waited
        (1.02, 0.02),
        (0.7, 0.001),  # steps of other causes
        (3.0, 0.2),  # no more than the copy took
    ],
)
def test_a_copy_costs_what_it_lengthens_a_step(with_copy: float, cost: float) -> None:
    assert measured(1.0, with_copy, took=0.2, waited=0.001).cost(0) == pytest.approx(cost)


def test_copies_become_more_frequent_slowly_and_rarer_at_once() -> None:
    rate = measured(1.0, 1.039, took=0.2, waited=0.001)
    assert rate.next(0) == 4
    for _ in range(3):
        rate.step(1.018, copied=True)
    assert rate.next(0) == 4, "0.018 s would fit into 2 steps, 1.5 times as much would not"
    for _ in range(3):
        rate.step(1.001, copied=True)
    assert [rate.next(0) for _ in range(3)] == [2, 1, 1]
    for _ in range(3):
        rate.step(1.1, copied=True)
    assert rate.next(0) == 16


def test_the_cost_stays_below_a_percent_whatever_a_copy_costs() -> None:
    draw = random.Random(46)
    for _ in range(often(200)):
        step, cost = 10 ** draw.uniform(-2, 1), 10 ** draw.uniform(-3, 1)
        took = cost * draw.uniform(1, 3)
        rate, lost, total = Rate(), 0.0, 0.0
        next_copy, number = 1, 0
        for at in range(1, 20_000):
            copied = at == next_copy
            seconds = step * draw.uniform(0.98, 1.02) + copied * cost
            if copied:
                number += 1
                next_copy = at + rate.next(int(took * (1 << 30)))
                rate.copied(took, 0.0)
            rate.step(seconds, copied)
            if number > 3:
                lost, total = lost + copied * cost, total + seconds
        # after the first copies, and but for the scatter of steps
        assert number < 8 or lost <= (SHARE + 0.005) * total, (step, cost, number)
