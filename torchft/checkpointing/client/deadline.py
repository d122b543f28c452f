"""The end of a target's wait for a state."""

from __future__ import annotations

import time
from typing import Callable


class Deadline:
    """Ends a transfer after a time, or, if other groups wait for it as long as it makes progress, after such
    a time without any data: a slow network then heals slowly.

    Args:
        timeout: in seconds
        of_progress: whether data that arrives moves the deadline
        clock: returns seconds

    Attributes:
        at: the deadline, in seconds of the clock
    """

    def __init__(
        self, timeout: float, of_progress: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout = timeout
        self._of_progress = of_progress
        self._clock = clock
        self._start = clock()
        self.at = self._start + timeout

    def arrived(self) -> float:
        """Moves the deadline, since data has arrived. Returns it."""
        if self._of_progress:
            self.at = self._clock() + self._timeout
        return self.at

    @property
    def left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.at - self._clock()

    def passed(self) -> str:
        """How a transfer timed out, for the error."""
        if self._of_progress:
            return f"because nothing arrived for {self._timeout:g} seconds"
        return f"after {self._clock() - self._start:.1f} seconds"
