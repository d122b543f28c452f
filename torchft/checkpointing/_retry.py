"""When a target asks a source again for a checkpoint, in either format: pure.

The native core reconnects its data connections by itself (go/heal/retry.go). If it cannot, the target asks the source
here for a new ticket. A stream of the upstream format starts again from the beginning.
"""

from __future__ import annotations

from typing import Optional

MOST = 4  # attempts in a row in which nothing arrives
PAUSE = 0.1  # seconds before the second; doubles


class Attempts:
    """The attempts to get one checkpoint.

    Args:
        deadline: of all of them, in seconds of any clock
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._failed = 0  # in a row

    def failed(self, progress: bool, now: float) -> Optional[float]:
        """One was interrupted.

        Args:
            progress: whether more of the checkpoint is here than before it
            now: by the clock of the deadline

        Returns:
            seconds until the next one; None: there is none
        """
        self._failed = 1 if progress else self._failed + 1
        pause = PAUSE * 2 ** (self._failed - 1)
        return None if self._failed >= MOST or now + pause >= self._deadline else pause
