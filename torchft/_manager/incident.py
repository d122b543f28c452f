"""Measures what a failure costs, by phase: from when this rank notices it to the next commit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Optional

if TYPE_CHECKING:
    from torchft._manager.state import Place


class Incident:
    """A failure, from when this rank notices it until its next commit. Phases follow one another without a gap; the
    times of a phase that occurs several times are added up.

    Args:
        cause: the error that was noticed, as text.
        step: step in which it was noticed.
        quorum_id: id of the quorum in which it was noticed.
    """

    def __init__(self, cause: str, step: int, quorum_id: int) -> None:
        self.cause = cause
        self.step = step
        self.quorum_id = quorum_id
        self.steps_lost = 0
        self._last = self._began = time.monotonic()
        self._phases: dict[str, float] = {}

    def ended(self, phase: str) -> None:
        """Ends a phase. The phase began at the end of the previous one, or when the failure was noticed."""
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
    """Measures one incident at a time, from an error to the next commit. Further errors until then are part of it.

    Args:
        place: the step and quorum of the rank.
        over: called with an incident when it has ended.
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
        """A phase of the incident has ended, on any thread."""
        incident = self._incident  # read once: the training thread may end it
        if incident is not None:
            incident.ended(phase)

    def step_ended(self, committed: bool) -> None:
        """The vote on a step has ended. A committed step ends the incident."""
        incident = self._incident
        if incident is None:
            return
        if committed:
            incident.ended("next step")
            self._over(incident)
            self._incident = None
        else:
            incident.steps_lost += 1
            incident.ended("vote")
