"""Which step a group restores, and where each rank finds it."""

from __future__ import annotations

import pytest

from torchft.checkpointing.snapshots.choice import Chosen, Copy, newest


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
