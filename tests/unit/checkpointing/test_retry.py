"""The pauses before retries, as a table, and the errors after which there is a retry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import pytest

from torchft.checkpointing._handshake import Garbled
from torchft.checkpointing._http_client import Refused
from torchft.checkpointing._receive import SourceFailed
from torchft.checkpointing._retry import PAUSE, Attempts
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout, Interrupted, Unsendable


@pytest.mark.parametrize(
    ("deadline", "attempts", "pauses"),
    [
        (10.0, [False, False, False, False], [PAUSE, 2 * PAUSE, 4 * PAUSE, None]),
        (10.0, [False, False, True, False, False, False], [PAUSE, 2 * PAUSE, PAUSE, 2 * PAUSE, 4 * PAUSE, None]),
        (10.0, [True] * 9, [PAUSE] * 9),
        (PAUSE, [True], [None]),  # the deadline passes during the pause
        (2 * PAUSE, [False, False], [PAUSE, None]),
    ],
)
def test_pauses_between_attempts(deadline: float, attempts: Sequence[bool], pauses: list[Optional[float]]) -> None:
    of_one = Attempts()
    assert [of_one.failed(progress, left=deadline) for progress in attempts] == pauses


@pytest.mark.parametrize(
    ("kind", "retried"),
    [
        (Interrupted, True),
        (Garbled, True),
        (SourceFailed, True),
        (Refused, False),
        (Unsendable, False),
        (CheckpointError, False),
        (CheckpointTimeout, False),
    ],
)
def test_which_errors_are_interruptions(kind: type[Exception], retried: bool) -> None:
    assert issubclass(kind, Interrupted) is retried
