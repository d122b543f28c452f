"""The choice between a heal at once and one in passing."""

from __future__ import annotations

import math
from typing import Optional

import pytest

from torchft._manager.heal.mode import LITTLE, Figures, Measured, why_at_once
from torchft._manager.settings import HealMode

GB, MB = 1e9, 1e6


@pytest.mark.parametrize(
    ("nbytes", "groups", "reason"),
    [
        (0, 5, "it has about 0.0 MB"),  # no optimizer is known
        (LITTLE - 1, None, "it has about 25.0 MB"),
        (LITTLE, None, ""),
        (LITTLE, 2, ""),
        (LITTLE, 1, "one group alone has it"),
        (1 << 34, 1, "one group alone has it"),
        (1 << 34, 100, ""),
        (1 << 10, 1, "it has about 0.0 MB"),
    ],
)
def test_what_is_decided_before_a_heal_begins(nbytes: int, groups: Optional[int], reason: str) -> None:
    decided = why_at_once(nbytes, groups)
    assert bool(decided) == bool(reason) and (decided or "").startswith(reason)


@pytest.mark.parametrize(
    ("nbytes", "rate", "step_sec", "overlap_sec", "groups", "at_once", "in_passing"),
    [
        # a quarter of the time is spent on requests
        (1 * GB, 200 * MB, 0.1, 0.05, 1, 9.95, 21.2),
        (1 * GB, 200 * MB, 0.1, 0.05, 4, 24.8, 24.2),
        (1 * GB, 2 * GB, 1.0, 0.5, 100, 0.5, 14.0),  # the transfer is hidden behind the forward pass
        (10 * GB, 1 * GB, 1.0, 0.5, 3, 38.5, 48.0),
        (10 * GB, 1 * GB, 1.0, 0.5, 5, 57.5, 52.0),
        (1 * MB, 200 * MB, 0.1, 0.0, 3, 0.02, 0.223),
    ],
)
def test_the_least_loss_of_all_groups_together(
    nbytes: float,
    rate: float,
    step_sec: float,
    overlap_sec: float,
    groups: int,
    at_once: float,
    in_passing: float,
) -> None:
    figures = Figures(nbytes, nbytes, rate, rate / 4, step_sec, overlap_sec, groups, 60.0, rest=0)
    assert figures.lost_at_once == pytest.approx(at_once)
    assert figures.lost_in_passing == pytest.approx(in_passing)
    assert figures.mode is (HealMode.AT_ONCE if at_once < in_passing else HealMode.IN_PASSING)


def test_what_comes_at_the_end_is_waited_for_in_any_case() -> None:
    figures = Figures(36 * MB, 36 * MB, 200 * MB, 50 * MB, 0.1, 0.0, 3, 60.0, rest=400 * MB)
    assert figures.lost_at_once == pytest.approx(8.72)
    assert figures.lost_in_passing == pytest.approx(9.028)
    assert figures.mode is HealMode.AT_ONCE


def test_what_has_arrived_counts_for_the_heal_in_passing() -> None:
    figures = Figures(GB, GB, 200 * MB, 50 * MB, 0.1, 0.0, 3, 60.0, rest=0)
    assert figures.mode is HealMode.AT_ONCE
    assert figures._replace(timeout_sec=9.0).mode is HealMode.IN_PASSING, "it would hardly end"
    assert figures._replace(left=0.5 * GB).mode is HealMode.IN_PASSING


def test_the_figures_are_those_of_steps_at_a_settled_pace() -> None:
    measured = Measured(1000, rest=5)

    def quorum(now: float, settled: bool) -> Optional[Figures]:
        return measured.quorum(now, 0.4, 2, math.inf, settled)

    assert quorum(10.0, False) is None
    measured.part(1200, 100, 0.5)
    assert quorum(11.0, False) is quorum(12.0, False) is None
    assert quorum(13.0, False) == Figures(12000, 10800, 2400, 2400, 1.0, 0.4, 2, math.inf, 5), (
        "the best possible pace"
    )
    for step in range(9):
        assert quorum(14.0 + 2 * step, True) is None
        measured.part(300, 25, 0.125)
    figures = quorum(32.0, True)
    assert figures == Figures(12000, 8100, 2400, 150, 2.0, 0.4, 2, math.inf, 5)
    assert quorum(34.0, True) is None, "only once"


def test_without_a_part_there_are_no_figures() -> None:
    measured = Measured(1000, rest=0)
    for step in range(5):
        assert measured.quorum(10.0 + step, 0.0, 2, 60.0, False) is None
    measured.part(1200, 100, 0.5)
    assert measured.quorum(15.0, 0.0, 2, 60.0, False) is not None
