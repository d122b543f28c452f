"""The choice between a heal at once and one in passing."""

from __future__ import annotations

import pytest

from torchft._manager.heal_plan import Figures, Measured, Mode

GB, MB = 1e9, 1e6


@pytest.mark.parametrize(
    ("nbytes", "rate", "step_sec", "overlap_sec", "groups", "at_once", "in_passing"),
    [
        # a quarter of the time is spent on requests
        (1 * GB, 200 * MB, 0.1, 0.05, 1, 9.95, 20.2),
        (1 * GB, 200 * MB, 0.1, 0.05, 4, 24.8, 20.2),
        (1 * GB, 2 * GB, 1.0, 0.5, 100, 0.5, 4.0),  # the transfer is hidden behind the forward pass
        (10 * GB, 1 * GB, 1.0, 0.5, 3, 38.5, 42.0),
        (10 * GB, 1 * GB, 1.0, 0.5, 5, 57.5, 42.0),
        (1 * MB, 200 * MB, 0.1, 0.0, 3, 0.02, 0.22),
    ],
)
def test_the_least_loss_of_all_groups_together(
    nbytes: float, rate: float, step_sec: float, overlap_sec: float, groups: int, at_once: float, in_passing: float
) -> None:
    figures = Figures(nbytes, nbytes, rate, rate / 4, step_sec, overlap_sec, groups, 60.0)
    assert figures.lost_at_once == pytest.approx(at_once)
    assert figures.lost_in_passing == pytest.approx(in_passing)
    assert figures.mode is (Mode.AT_ONCE if at_once < in_passing else Mode.IN_PASSING)


def test_what_has_arrived_counts_for_the_heal_in_passing() -> None:
    figures = Figures(GB, GB, 200 * MB, 50 * MB, 0.1, 0.0, 3, 60.0)
    assert figures.mode is Mode.AT_ONCE
    assert figures._replace(timeout_sec=9.0).mode is Mode.IN_PASSING, "it would hardly end"
    assert figures._replace(left=0.5 * GB).mode is Mode.IN_PASSING


def test_the_figures_are_those_of_three_steps() -> None:
    measured = Measured()
    assert measured.quorum(10.0, 1000, 0.0, 2, 60.0) is None
    assert measured.quorum(11.0, 1000, 0.0, 2, 60.0) is None
    measured.piece(1200, 100, 0.25)
    assert measured.quorum(12.0, 1000, 0.0, 2, 60.0) is None
    measured.piece(1200, 100, 0.75)
    figures = measured.quorum(13.0, 1000, 0.4, 2, 60.0)
    assert figures == Figures(12000, 9600, 2400, 800, 1.0, 0.4, 2, 60.0)
    assert measured.quorum(14.0, 1000, 0.4, 2, 60.0) is None, "only once"


def test_without_a_piece_there_are_no_figures() -> None:
    measured = Measured()
    for step in range(5):
        assert measured.quorum(10.0 + step, 1000, 0.0, 2, 60.0) is None
    measured.piece(1200, 100, 0.5)
    assert measured.quorum(15.0, 1000, 0.0, 2, 60.0) is not None
