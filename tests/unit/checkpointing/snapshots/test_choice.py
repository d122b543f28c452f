"""Which step a group restores, and where each rank finds it."""

from __future__ import annotations

import pytest

from torchft.checkpointing.snapshots.choice import Chosen, Copy, given_up, newest


def copies(*found: tuple[int, int, str]) -> list[Copy]:
    return [Copy(*one) for one in found]


@pytest.mark.parametrize(
    ("ranks", "choice"),
    [
        ([], None),
        ([[]], None),
        ([copies((3, 1, "a"))], Chosen(3, 1, ("a",))),
        ([copies((3, 1, "a"), (4, 1, "b"))], Chosen(4, 1, ("b",))),
        # a rank that was killed while it wrote step 4 has step 2 left
        (
            [copies((3, 1, "a"), (4, 1, "b")), copies((3, 1, "c"), (2, 1, "d"))],
            Chosen(3, 1, ("a", "c")),
        ),
        ([copies((4, 1, "a")), copies((3, 1, "b"))], None),
        ([copies((4, 1, "a")), []], None),
        # two histories of step 4: not one rank's part of each
        (
            [copies((4, 1, "a"), (3, 1, "b")), copies((4, 7, "c"), (3, 1, "d"))],
            Chosen(3, 1, ("b", "d")),
        ),
        (
            [copies((4, 1, "a"), (4, 7, "b")), copies((4, 7, "c"), (4, 1, "d"))],
            Chosen(4, 7, ("b", "c")),
        ),
        # the first of two places of the same copy
        ([copies((4, 1, "own"), (4, 1, "other"))], Chosen(4, 1, ("own",))),
    ],
)
def test_newest(ranks: list[list[Copy]], choice: Chosen | None) -> None:
    assert newest(ranks) == choice


@pytest.mark.parametrize(
    ("found", "states"),
    [
        ([(500, 1, 10.0), (500, 1, 11.0), (499, 1, 9.0)], set()),
        ([(500, 1, 10.0), (300, 2, 20.0), (310, 2, 21.0)], {(500, 1)}),
        ([(500, 1, 10.0), (490, 1, 9.0), (495, 2, 20.0)], {(500, 1)}),  # the job went on from step 490
        ([(500, 7, 10.0), (900, 2, 20.0)], set()),  # the ids have begun anew
        ([(500, 7, 10.0), (300, 2, 20.0)], set()),  # nothing tells
    ],
)
def test_copies_of_a_history_that_the_job_has_given_up(
    found: list[tuple[int, int, float]], states: set[tuple[int, int]]
) -> None:
    copies = [Copy(step, quorum, "here", saved) for step, quorum, saved in found]
    assert given_up(copies).keys() == states
    assert all(other.step < step for (step, _), other in given_up(copies).items())
