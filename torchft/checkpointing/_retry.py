"""Decides when a target retries a request for a checkpoint, in either format. Pure.

The native core reconnects its data connections by itself (go/heal/retry.go). If it cannot, the target asks the source
here for a new ticket. A stream of the upstream format starts again from the beginning.
"""

from __future__ import annotations

from typing import Optional

MOST = 4  # consecutive attempts in which nothing arrives
PAUSE = 0.1  # seconds before the second attempt; doubles with each further one


class Attempts:
    """Counts the attempts to receive one checkpoint."""

    def __init__(self) -> None:
        self._failed = 0  # consecutive attempts without progress

    def failed(self, progress: bool, left: float) -> Optional[float]:
        """Called when an attempt was interrupted.

        Args:
            progress: whether the attempt received more of the checkpoint
            left: seconds until the deadline of the transfer

        Returns:
            seconds until the next attempt; None if there is none
        """
        self._failed = 1 if progress else self._failed + 1
        pause = PAUSE * 2 ** (self._failed - 1)
        return None if self._failed >= MOST or pause >= left else pause
