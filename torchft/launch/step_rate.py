"""The rate of a job's steps."""

from __future__ import annotations

from collections import deque

_OVER_SEC = 5.0
_MOST_PERIODS = 3  # without a step for this many times the usual duration of one, the rate is unknown


class StepRate:
    """Steps per second of the groups that train, from looks at the job.

    The groups of a quorum are in the same step, so they have one rate. The step of a single group, or of
    different quorums, would not do: a group that heals takes over the step of the others.
    """

    def __init__(self) -> None:
        self._quorum = 0
        self._looked = 0.0
        self._steps: deque[tuple[float, int]] = deque()  # when each step was first seen

    def look(self, now: float, quorum: int, step: int) -> None:
        """Records what the lighthouse shows: the id of the quorum and its step. `now` is in seconds."""
        if quorum != self._quorum:
            self._quorum = quorum
            self._steps.clear()
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[1][0] >= _OVER_SEC:
            self._steps.popleft()
        self._looked = now

    def __str__(self) -> str:
        """The rate; empty if it is unknown, as in the first step of a quorum, or if a step takes long."""
        if len(self._steps) < 2:
            return ""
        (began, first), (ended, last) = self._steps[0], self._steps[-1]
        step = (ended - began) / (last - first)
        if self._looked - ended > max(_OVER_SEC, _MOST_PERIODS * step):
            return ""
        return f"{1 / step:.1f} steps/s" if step < 1 else f"{step:.1f} s/step"
