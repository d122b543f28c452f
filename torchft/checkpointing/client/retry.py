"""Decides when a target retries a request for a checkpoint, in either format. Pure.

The native core reconnects its data connections by itself (go/heal/retry.go). If it cannot, the target asks
the source here for a new ticket. A stream of the upstream format starts again from the beginning.
"""

from __future__ import annotations

from typing import Optional

MOST = 4  # consecutive attempts in which nothing arrives
PAUSE = 0.1  # seconds before the second attempt; doubles with each further one


class Attempts:
    """Counts the attempts to receive one checkpoint."""

    def __init__(self) -> None:
        self._failed = 0  # consecutive attempts without progress

    def failed(self, progress: bool, left: float, retry_after: Optional[float] = None) -> Optional[float]:
        """Counts an interrupted attempt.

        Args:
            progress: whether the attempt received more of the checkpoint
            left: seconds until the deadline of the transfer
            retry_after: seconds after which a busy source wants to be asked again; None: it was not busy. An
                attempt at a busy source does not count: the target waits until the deadline.

        Returns:
            seconds until the next attempt; None if there is none
        """
        if retry_after is not None:
            pause = max(PAUSE, retry_after)
            return None if pause >= left else pause
        self._failed = 1 if progress else self._failed + 1
        pause = PAUSE * 2 ** (self._failed - 1)
        return None if self._failed >= MOST or pause >= left else pause
