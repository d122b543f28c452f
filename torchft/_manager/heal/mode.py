"""Decides whether a group takes over a state at once or in passing, so that a job loses the least time. Pure
code.

:func:`why_at_once` decides at the first quorum of a heal, :class:`Measured` after some steps in passing.

At once, all groups wait for the transfer, apart from what passes before the first reduction of the step. In
passing, none waits, but the group that heals is missing for longer: parts are requested in a part of the time
only, which costs the others at most :data:`COST` of it. The loss is counted in seconds of groups that do not
train.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Optional

from torchft._manager.heal.pace import COST
from torchft._manager.settings import HealMode

# Steps from the last part to the first step that counts: the parts are compared, and the rest is fetched.
_LAST_STEPS = 2
# Steps that are measured at a settled pace, one of them without requests, and those before the first figures.
_STEPS, _FIRST_STEPS = 9, 3
# Bytes of a state that a link of 100 MB/s transfers in 0.25 s. In passing it would take some steps.
LITTLE = 25_000_000


def why_at_once(nbytes: int, groups: Optional[int] = None) -> Optional[str]:
    """Decides without measurements: returns why a state of so many bytes, which so many groups have (None:
    not known yet), is transferred at once; None: the heal begins in passing.
    """
    if nbytes < LITTLE:
        return f"it has about {nbytes / 1e6:.1f} MB"
    if groups == 1:
        return "one group alone has it: if that failed during a heal in passing, this group would have to end"
    return None


class Figures(NamedTuple):
    """The measurements of a heal in passing, some steps after its begin.

    Attributes:
        nbytes: bytes that arrive in parts.
        left: bytes of these that have not arrived.
        rate: bytes a second, while they are requested.
        pace: bytes a second, over all of the time.
        step_sec: seconds of a step.
        overlap_sec: seconds of a step before its first reduction, in which no group waits.
        groups: number of groups that would wait.
        timeout_sec: limit for a transfer of the whole state; inf: only for one without progress.
        rest: bytes that come at the end in any case, for which all groups wait.
    """

    nbytes: float
    left: float
    rate: float
    pace: float
    step_sec: float
    overlap_sec: float
    groups: int
    timeout_sec: float
    rest: float

    def _wait(self, nbytes: float) -> float:
        """The loss by a transfer within a step."""
        transfer = nbytes / self.rate
        return transfer + self.groups * max(0.0, transfer - self.overlap_sec)

    @property
    def lost_at_once(self) -> float:
        """The loss if the whole state is transferred within the next step."""
        return self._wait(self.nbytes + self.rest)

    @property
    def lost_in_passing(self) -> float:
        """The further loss if the heal goes on in passing."""
        parts = self.left / self.pace * (1 + self.groups * COST)
        return parts + _LAST_STEPS * self.step_sec + self._wait(self.rest)

    @property
    def mode(self) -> HealMode:
        """The way that loses less: AT_ONCE or IN_PASSING."""
        ends = (self.nbytes + self.rest) / self.rate < self.timeout_sec / 2  # all groups may be slower then
        return HealMode.AT_ONCE if ends and self.lost_at_once < self.lost_in_passing else HealMode.IN_PASSING


class Measured:
    """Measures a heal in passing, in seconds of any monotonic clock. `elements`: of all parameters; `rest`:
    see :class:`Figures`.
    """

    def __init__(self, elements: int, rest: int) -> None:
        self._all, self._rest = elements, rest
        # Time and bytes at the latest quorums.
        self._marks: deque[tuple[float, int]] = deque(maxlen=_STEPS + 1)
        self._settled = self._chosen = False
        self._nbytes = self._elements = 0
        self._seconds = 0.0

    def part(self, nbytes: int, elements: int, seconds: float) -> None:
        """Counts a part that has arrived: its bytes with optimizer state, and the time of the request."""
        self._nbytes += nbytes
        self._elements += elements
        self._seconds += seconds

    def quorum(
        self, now: float, overlap_sec: float, groups: int, timeout_sec: float, settled: bool
    ) -> Optional[Figures]:
        """Begins a step. Returns figures after some steps, and none once they were measured when the pace had
        *settled*: it is adapted to what requests cost (pace.py). Before that, the figures have the best pace
        that is possible, so that a heal which would lose less at once even then does not go on.
        """
        if settled and not self._settled:
            self._settled = True
            self._marks.clear()
        self._marks.append((now, self._nbytes))
        began, before = self._marks[0]
        steps, seconds, arrived = len(self._marks) - 1, now - began, self._nbytes - before
        needed = _STEPS if settled else _FIRST_STEPS
        if self._chosen or steps < needed or seconds <= 0 or not arrived or self._seconds <= 0:
            return None
        self._chosen = settled
        nbytes, rate = self._nbytes * self._all / self._elements, self._nbytes / self._seconds
        left = max(0.0, nbytes - self._nbytes)
        pace = arrived / seconds if settled else rate
        return Figures(
            nbytes, left, rate, pace, seconds / steps, overlap_sec, groups, timeout_sec, self._rest
        )
