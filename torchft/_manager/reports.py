"""What a rank tells its manager server for people to see: how far a heal is, what recoveries cost, averages with NaN.

It goes to the server's metrics and to the lighthouse's page. Nothing depends on it, and nothing of it is said in a step
that is as it should be.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torchft import _torchft

if TYPE_CHECKING:
    from torchft._manager.incident import Incident
    from torchft._manager.phases import Phases

_logger = logging.getLogger("torchft.manager")


class Reports:
    """Says it through a client.

    Args:
        client: of this rank's manager server; with one that only stands in for ours nothing is said.
        group_rank: of this rank.
    """

    def __init__(self, client: Any, group_rank: int) -> None:
        self._client = client if type(client) is _torchft.ManagerClient else None
        self._group_rank = group_rank

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

    def nonfinite(self) -> None:
        """An average that this rank uses holds NaN or Inf."""
        self._say("_say_nonfinite")

    def _say(self, call: str, *args: Any, **kwargs: Any) -> None:
        if self._client is None:
            return
        try:
            getattr(self._client, call)(self._group_rank, *args, **kwargs)
        except RuntimeError as e:  # the client is shut down
            _logger.debug("not told: %s", e)
