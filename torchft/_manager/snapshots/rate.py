"""When a copy of the state is due: so often that copies cost at most 1 % of the time. Pure code.

Times are in seconds, measured by the caller.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Optional

# The part of the time that copies may cost. The first copies may cost more: without them a failure in the
# first minutes would lose all steps.
SHARE, FIRST_SHARE = 0.01, 0.04
_FIRST = 3  # copies
_LONGEST = 1 << 20  # steps between two copies
_GUESS = 1 << 30  # bytes that are copied in a second, before the first copy
_KNOWN = 16  # steps without a copy that are remembered
_NEEDED = 3  # steps with and without a copy, before their difference is known
_LESS = 1.5  # by so much copies must be cheaper before they are made twice as often


def interval(step: float, cost: float, share: float = SHARE) -> int:
    """Returns the least power of two of steps in which one copy costs at most a share of the time.

    Args:
        step: seconds of a step.
        cost: seconds that the training loses by a copy.
        share: the part of the time.
    """
    steps = 1
    while steps < _LONGEST and cost > share * step * steps:
        steps *= 2
    return steps


class Rate:
    """Steps between two copies of one group.

    A copy costs the time by which a step with a copy is longer than one without. It cannot be less than the
    training thread has waited, nor more than the duration of the copy: that bounds differences that have
    other causes.
    """

    def __init__(self) -> None:
        self._with: deque[float] = deque(maxlen=_NEEDED)
        self._without: deque[float] = deque(maxlen=_KNOWN)
        self._waited: deque[float] = deque(maxlen=_NEEDED)
        self._took: deque[float] = deque(maxlen=_NEEDED)
        self._copies = 0
        self._steps: Optional[int] = None

    def step(self, seconds: float, copied: bool) -> None:
        """Counts a committed step, with or without a copy."""
        (self._with if copied else self._without).append(seconds)

    def copied(self, took: float, waited: float) -> None:
        """Counts a copy.

        Args:
            took: seconds from its begin to its end.
            waited: seconds of these in which the training thread has waited.
        """
        self._copies += 1
        self._took.append(took)
        self._waited.append(waited)

    def cost(self, nbytes: int) -> float:
        """Returns the seconds that the training loses by a copy of so many bytes."""
        if not self._took:
            return nbytes / _GUESS
        most = max(median(self._took), median(self._waited))
        if len(self._with) < _NEEDED or len(self._without) < _NEEDED:
            return most
        return max(median(self._waited), min(most, median(self._with) - median(self._without)))

    def next(self, nbytes: int) -> int:
        """Returns the steps until the next copy; ``nbytes`` are those of the state."""
        known = self._without or self._with
        if not known:
            return 1
        step, cost = median(known), self.cost(nbytes)
        if self._copies < _FIRST:
            return interval(step, cost, FIRST_SHARE)
        steps = interval(step, cost)
        if self._steps is not None and steps < self._steps:
            steps = self._steps // 2 if interval(step, _LESS * cost) < self._steps else self._steps
        self._steps = steps
        return steps
