"""Decides when a group that trains along requests the next part of a state, so that steps stay short. Pure
code.

From a quorum to the first reduction of its step, the network between the groups is idle: requests follow each
other. Later a transfer would slow the reductions, the vote and the optimizers. So a request waits then until
those of this step, with the work on their answers, are at most a share of the time since the quorum.
:class:`TimeShare` adapts it: the steps of all groups end together, so the target sees in its own steps what
the others lose.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Optional

# The part of a step that requests may cost.
COST = 0.05
# The share at first, and the least one, with which requests do not follow each other before a reduction.
START, LEAST = 0.25, 0.1
# By so much the share grows in a decision, after it was halved for the first time.
MORE = 0.05
# Differences of fewer seconds are those of the scheduler, not of requests.
_CLOCK_SEC = 0.001
# The most by which steps without requests scatter.
_SCATTER = 0.25
# Steps with requests: for one decision, before the first step without requests, and between two such steps.
_DECISION, _FIRST, _EVERY = 3, 3, 8
# Steps without requests that are remembered, and those needed for a decision.
_KNOWN, _NEEDED = 5, 2


class TimeShare:
    """The share of a step in which parts are requested, from the durations of steps with and without
    requests.

    The share is doubled until requests cost too much. Then it is halved whenever they do, and grows by
    :data:`MORE` otherwise.

    Attributes:
        value: the share, above 0; 1: requests follow each other.
        quiet: whether nothing is requested in the current step, to measure it.
    """

    def __init__(self) -> None:
        self.value, self.quiet = START, False
        self._without: deque[float] = deque(maxlen=_KNOWN)
        self._with: deque[float] = deque(maxlen=_DECISION)  # since the last decision
        self._left = _FIRST  # steps until the next quiet one
        self._costs = False  # whether requests have cost too much

    @property
    def settled(self) -> bool:
        """Whether the share has been adapted: it does not double any more."""
        return self._costs or self.value == 1.0

    def step(self, seconds: float, requests: bool = False) -> None:
        """Ends a step, and sets the share of the next one. `requests`: whether there were some, though the
        step was to be quiet.
        """
        self._left -= 1
        if not self.quiet:
            self._with.append(seconds)
        else:
            if not requests:
                self._without.append(seconds)
            self._left = 1 if len(self._without) < _NEEDED else _EVERY
        self._decide()
        self.quiet = self._left <= 0

    def _decide(self) -> None:
        limit = self._limit()
        if limit is None or len(self._with) < _DECISION:
            return
        seconds = median(self._with)
        self._with.clear()
        if seconds <= limit:
            self.value = min(1.0, self.value + MORE if self._costs else 2 * self.value)
            stale = seconds * (1 + COST) < min(self._without)
        else:
            stale = self.value <= LEAST
            self.value, self._costs = max(LEAST, self.value / 2), True
        if stale:  # steps have become shorter or longer for another reason: they are measured again
            self._without.clear()
            self._left = 0

    def _limit(self) -> Optional[float]:
        """The longest step for which requests are not blamed; None: not known.

        If steps without requests differ by more than :data:`COST`, the longest of them counts. A step that is
        longer by far is an exception, such as one with an evaluation.
        """
        if len(self._without) < _NEEDED:
            return None
        middle = median(self._without)
        return max(middle * (1 + COST), middle + _CLOCK_SEC, min(max(self._without), middle * (1 + _SCATTER)))


class Pace:
    """The pauses of one target. Times are in seconds, of any monotonic clock.

    Attributes:
        overlap: seconds from a quorum to the first reduction of its step, in the last step.
        share: the share of the time since the quorum for requests.
    """

    overlap = 0.0

    def __init__(self) -> None:
        self.share = TimeShare()
        self._in_pass = False
        self._began: Optional[float] = None  # time of the quorum
        self._spent = 0.0  # on requests and answers since then
        self._last = 0.0  # duration of the previous step

    def quorum(self, now: float) -> None:
        """Begins a step, whose quorum is known: until the first reduction there is mostly no pause.

        The duration of an earlier request no longer counts: the request may have waited for the source's next
        step.
        """
        if self._began is not None:
            self._last = max(0.0, now - self._began)
            self.share.step(self._last, requests=self._spent > COST * self._last)
        self._in_pass, self._began, self._spent = True, now, 0.0

    def reduces(self, now: float) -> None:
        """Ends the time before the first reduction of a step; further calls do nothing."""
        if self._in_pass:
            assert self._began is not None
            self._in_pass, self.overlap = False, max(0.0, now - self._began)

    def of_step(self, seconds: float) -> float:
        """A time as a share of the previous step."""
        return seconds / self._last if self._last else 1.0

    def spent(self, began: float, now: float) -> None:
        """Counts a time from ``began`` to ``now`` in which a request was answered, or an answer taken up."""
        if self._began is not None:
            self._spent += max(0.0, now - max(began, self._began))

    def pause(self, now: float) -> float:
        """Returns the seconds until the next request; 0: at once."""
        if self._began is None:
            return 0.0
        # A step is measured without requests unless it takes much longer, as with an evaluation.
        if self.share.quiet and (left := self._began + 2 * self._last - now) > 0:
            return left
        if self._in_pass and self.share.value > LEAST:
            return 0.0
        return max(0.0, self._began + self._spent / self.share.value - now)
