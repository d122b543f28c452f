"""What a rank reports to its manager server for display: the progress of heals, the cost of recoveries, and counts.

It goes to the server's metrics and to the lighthouse's page. Nothing depends on it, and nothing of it is said in a step
that is as it should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchft._manager.incident import Incident
    from torchft._manager.phases import Phases


class Reports:
    """Says it.

    Args:
        say: calls the method of the client that it is given the name of.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say

    def counted(self, name: str, number: int = 1) -> None:
        """It has happened so many times: ``Counters`` in go/rankclient/counted.go has the names."""
        self._say("_say_counted", name, number)

    def healing(self, received: int, total: int) -> None:
        """Bytes of a peer's state that have come, and all of them."""
        self._say("_say_healing", received, total)

    def healed(self, step: int, phases: Phases) -> None:
        """A peer's state of a step was loaded."""
        self._say(
            "_say_recovered",
            healed=True,
            quorum_id=0,
            step=step,
            nbytes=phases.received,
            steps_lost=0,
            phases=phases.seconds,
        )

    def recovered(self, step: int, incident: Incident) -> None:
        """A step was committed again after a failure."""
        phases = {name: seconds for name, seconds in incident.seconds().items() if name != "total"}
        self._say(
            "_say_recovered",
            healed=False,
            quorum_id=incident.quorum_id,
            step=step,
            nbytes=0,
            steps_lost=incident.steps_lost,
            phases=phases,
        )
