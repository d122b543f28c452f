"""The reports of a rank to its manager server: the progress of heals, the duration of recoveries, and counts.

The server shows the reports in its metrics, and the lighthouse shows them on its dashboard. Training does not depend on
them, and a normal step reports nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchft._manager.incident import Incident
    from torchft._manager.phases import Phases


class Reports:
    """Sends the reports.

    Args:
        report: calls a method of the client, given its name and arguments.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report

    def counted(self, name: str, number: int = 1) -> None:
        """Adds to a counter; go/manager/counted.go lists the names (``Counters``)."""
        self._report("_report_count", name, number)

    def healing(self, received: int, total: int) -> None:
        """Reports the bytes of a peer's state that have arrived, and the total."""
        self._report("_report_healing", received, total)

    def healed(self, step: int, phases: Phases) -> None:
        """Reports that a peer's state was loaded, and its step."""
        self._report(
            "_report_recovered",
            healed=True,
            quorum_id=0,
            step=step,
            nbytes=phases.received,
            steps_lost=0,
            phases=phases.seconds,
        )

    def recovered(self, step: int, incident: Incident) -> None:
        """Reports the duration of a failure, when the first step after it is committed."""
        phases = {name: seconds for name, seconds in incident.seconds().items() if name != "total"}
        self._report(
            "_report_recovered",
            healed=False,
            quorum_id=incident.quorum_id,
            step=step,
            nbytes=0,
            steps_lost=incident.steps_lost,
            phases=phases,
        )
