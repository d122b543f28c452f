"""Decides when a group that trains along requests the next piece of a state, so that steps stay short. Pure code.

From a quorum to the first reduction of its step, the network between the groups is idle: requests follow each other.
Later a transfer would slow the reductions, the vote and the optimizers, so each request is followed by a pause.
"""

from __future__ import annotations

# The length of a pause, as a multiple of the time that the request took.
PAUSE = 3.0


class Pace:
    """The pauses of one target. Times are in seconds, of any monotonic clock."""

    def __init__(self) -> None:
        self._in_pass = False
        self._since = 0.0  # end of the last pass
        self._until = 0.0  # end of the pause

    def quorum(self) -> None:
        """Called when a quorum is known: until the first reduction there is no pause.

        The duration of an earlier request no longer counts: the request may have waited for the source's next step.
        """
        self._in_pass, self._until = True, 0.0

    def reduces(self, now: float) -> None:
        """Called before each reduction of a step."""
        if self._in_pass:
            self._in_pass, self._since = False, now

    def spent(self, began: float, now: float) -> None:
        """Called when a request was answered, or an answer was taken up, in the time from ``began`` to ``now``."""
        if not self._in_pass:
            self._until = max(self._until, now) + PAUSE * (now - max(began, self._since))

    def pause(self, now: float) -> float:
        """Returns the seconds until the next request; 0: at once."""
        return 0.0 if self._in_pass else max(0.0, self._until - now)
