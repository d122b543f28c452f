"""Decides when a group that trains along requests the next piece of a state, so that steps stay short. Pure code.

From a quorum to the first reduction of its step, the network between the groups is idle: requests follow each other.
Later a transfer would slow the reductions, the vote and the optimizers. So a request waits then until those of this
step, with the work on their answers, are at most :data:`SHARE` of the time since the quorum.
"""

from __future__ import annotations

SHARE = 0.25


class Pace:
    """The pauses of one target. Times are in seconds, of any monotonic clock.

    Attributes:
        overlap: seconds from a quorum to the first reduction of its step, in the last step.
    """

    overlap = 0.0

    def __init__(self) -> None:
        self._in_pass = False
        self._began = 0.0  # time of the quorum
        self._spent = 0.0  # on requests and answers since then

    def quorum(self, now: float) -> None:
        """Called when a quorum is known: until the first reduction there is no pause.

        The duration of an earlier request no longer counts: the request may have waited for the source's next step.
        """
        self._in_pass, self._began, self._spent = True, now, 0.0

    def reduces(self, now: float) -> None:
        """Called before each reduction of a step."""
        if self._in_pass:
            self._in_pass, self.overlap = False, max(0.0, now - self._began)

    def spent(self, began: float, now: float) -> None:
        """Called when a request was answered, or an answer was taken up, in the time from ``began`` to ``now``."""
        self._spent += max(0.0, now - max(began, self._began))

    def pause(self, now: float) -> float:
        """Returns the seconds until the next request; 0: at once."""
        return 0.0 if self._in_pass else max(0.0, self._began + self._spent / SHARE - now)
