from __future__ import annotations

import itertools
import random

import pytest

from tests.bounded import often, todays
from torchft.data.cut import bounds


def sizes(units: int, speeds: tuple[int, ...]) -> list[int]:
    places = bounds(units, speeds)
    assert (places[0], places[-1], len(places)) == (0, units, len(speeds) + 1)
    return [end - first for first, end in itertools.pairwise(places)]


@pytest.mark.parametrize(
    ("units", "speeds", "expected"),
    [
        # one of four groups is half as fast
        (28, (100, 100, 100, 50), [8, 8, 8, 4]),
        (14, (100, 100, 100, 50), [4, 4, 4, 2]),
        (16, (100, 100, 100, 50), [5, 5, 4, 2]),
        (12, (50, 100, 100, 100), [2, 4, 3, 3]),
        (8, (100, 100, 100, 50), [3, 2, 2, 1]),
        # fewer units than follow the speeds: each group has one
        (5, (100, 100, 100, 1), [2, 1, 1, 1]),
        (9, (1, 100, 1), [1, 7, 1]),
        # only ratios count
        (28, (2, 2, 2, 1), [8, 8, 8, 4]),
        # a unit for each group, or fewer: as without speeds
        (4, (100, 1, 100, 1), [1, 1, 1, 1]),
        (2, (100, 1, 1), [0, 1, 1]),
        (0, (3, 1), [0, 0]),
        # equal speeds: as without
        (10, (7, 7, 7, 7), [2, 3, 2, 3]),
        (5, (100,), [5]),
    ],
)
def test_the_units_of_each_group(units: int, speeds: tuple[int, ...], expected: list[int]) -> None:
    assert sizes(units, speeds) == expected


def longest(parts: list[int], speeds: tuple[int, ...]) -> float:
    """When the last group ends; one without units computes a copy of one."""
    return max(max(1, part) / speed for part, speed in zip(parts, speeds))


def partitions(units: int, groups: int) -> list[list[int]]:
    if groups == 1:
        return [[units]]
    return [[n, *rest] for n in range(units + 1) for rest in partitions(units - n, groups - 1)]


def test_no_other_cut_ends_earlier() -> None:
    rng = random.Random(todays(0))
    for _ in range(often(1000)):
        groups, units = rng.randint(1, 4), rng.randint(0, 10)
        speeds = tuple(rng.randint(1, 9) for _ in range(groups))
        least = min(longest(parts, speeds) for parts in partitions(units, groups))
        assert longest(sizes(units, speeds), speeds) == pytest.approx(least), (units, speeds)


def test_with_twenty_units_a_group_it_is_within_a_twentieth_of_the_ideal() -> None:
    rng = random.Random(todays(1))
    for _ in range(often(5000)):
        groups = rng.randint(1, 16)
        speeds = tuple(rng.randint(25, 100) for _ in range(groups))
        units = rng.randint(20 * groups, 60 * groups)
        ideal = units / sum(speeds)  # without whole units
        assert ideal / longest(sizes(units, speeds), speeds) >= 0.95, (units, speeds)
