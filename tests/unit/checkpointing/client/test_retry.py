"""The pauses before retries, as a table, and the errors after which there is a retry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import pytest

from torchft.checkpointing.client.request import Busy, RequestRefused
from torchft.checkpointing.client.retry import MOST, PAUSE, Attempts
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout, Interrupted, Unsendable


@pytest.mark.parametrize(
    ("deadline", "attempts", "pauses"),
    [
        (10.0, [False, False, False, False], [PAUSE, 2 * PAUSE, 4 * PAUSE, None]),
        (
            10.0,
            [False, False, True, False, False, False],
            [PAUSE, 2 * PAUSE, PAUSE, 2 * PAUSE, 4 * PAUSE, None],
        ),
        (10.0, [True] * 9, [PAUSE] * 9),
        (PAUSE, [True], [None]),  # the deadline passes during the pause
        (2 * PAUSE, [False, False], [PAUSE, None]),
    ],
)
def test_pauses_between_attempts(
    deadline: float, attempts: Sequence[bool], pauses: list[Optional[float]]
) -> None:
    of_one = Attempts()
    assert [of_one.failed(progress, left=deadline) for progress in attempts] == pauses


def test_a_busy_source_is_asked_until_the_deadline() -> None:
    of_one = Attempts()
    assert [of_one.failed(False, 10.0, retry_after=2.0) for _ in range(3 * MOST)] == [2.0] * 3 * MOST
    assert of_one.failed(False, 10.0, retry_after=0.0) == PAUSE
    assert of_one.failed(False, 2.0, retry_after=2.0) is None
    assert of_one.failed(False, 10.0) == PAUSE, "the first attempt that counts"


@pytest.mark.parametrize(
    ("kind", "retried"),
    [
        (Interrupted, True),
        (Busy, True),
        (RequestRefused, False),
        (Unsendable, False),
        (CheckpointError, False),
        (CheckpointTimeout, False),
    ],
)
def test_which_errors_are_interruptions(kind: type[Exception], retried: bool) -> None:
    assert issubclass(kind, Interrupted) is retried
