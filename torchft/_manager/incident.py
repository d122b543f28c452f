"""What a failure cost, phase by phase: from the first sign of it to the next commit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Optional

if TYPE_CHECKING:
    from torchft._manager.state import Place


class Incident:
    """A failure, from when this rank knew of it until it commits again. Each phase counts once, when it first ends.

    Args:
        cause: what was noticed, in words.
        step: that it happened in.
        quorum_id: that it happened in.
    """

    def __init__(self, cause: str, step: int, quorum_id: int) -> None:
        self.cause = cause
        self.step = step
        self.quorum_id = quorum_id
        self.steps_lost = 0
        self._last = self._began = time.monotonic()
        self._phases: dict[str, float] = {}

    def ended(self, phase: str) -> None:
        """Ends a phase: the time since the one before, or since the failure was noticed, is its."""
        now = time.monotonic()
        self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, and ``total`` since the failure was noticed."""
        return {**self._phases, "total": self._last - self._began}

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {1000 * seconds:.0f} ms" for phase, seconds in self._phases.items())
        return (
            f"after a failure in step {self.step} of quorum {self.quorum_id} ({self.cause}) the next commit came in "
            f"{1000 * (self._last - self._began):.0f} ms ({phases}); {self.steps_lost} lost"
        )


class Incidents:
    """The failure after which nothing was committed yet, if there is one: what comes meanwhile belongs to it.

    Args:
        place: where the rank is.
        over: is given one that has ended.
    """

    def __init__(self, place: Place, over: Callable[[Incident], None]) -> None:
        self._place = place
        self._over = over
        self._incident: Optional[Incident] = None

    def noticed(self, cause: Exception) -> None:
        """An error was noticed, on any thread."""
        if self._incident is None:
            self._incident = Incident(str(cause), self._place.step, self._place.quorum_id)

    def ended(self, phase: str) -> None:
        """A phase of it has ended, on any thread."""
        incident = self._incident  # read once: the training thread ends it
        if incident is not None:
            incident.ended(phase)

    def step_ended(self, committed: bool) -> None:
        """A step was decided on: one that is committed ends the incident, which is told then."""
        incident = self._incident
        if incident is None:
            return
        if committed:
            incident.ended("next step")
            self._over(incident)
            self._incident = None
        else:
            incident.steps_lost += 1
            incident.ended("give up the step")
