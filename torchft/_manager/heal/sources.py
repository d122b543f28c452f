"""Where other groups offer their states: asks their manager servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from torchft.process_group._attempt import in_time

if TYPE_CHECKING:
    from torchft._manager.rank import RankState
    from torchft._torchft import ManagerClient

# The timeout for reaching an additional source. One that takes longer would hardly shorten the transfer.
_LOCATE_TIMEOUT = timedelta(seconds=3)


@dataclass(frozen=True, eq=False)
class Sources:
    """The counterparts of one rank in other groups."""

    connect: Callable[[str, timedelta], ManagerClient]  # opens a client to a manager server, within a timeout
    connect_timeout: timedelta  # for the manager server of the assigned source
    check_peers: Callable[[], None]  # raises if a member of the quorum is known to have failed
    rank_state: RankState  # has the timeout of the request for the state's address
    group_rank: int  # which rank of a source serves this one

    def locate(self, manager_address: str) -> str:
        """Where a group offers its state; one attempt, of at most 3 s."""
        return self._ask(self.connect(manager_address, _LOCATE_TIMEOUT), _LOCATE_TIMEOUT)

    def locate_assigned(self, manager_address: str) -> str:
        """Where the assigned source offers its state. The others wait: a source that fails costs no timeout.

        Raises:
            RuntimeError, TimeoutError: it cannot be reached.
            PeerFailed: a member of the quorum has failed meanwhile.
        """
        connecting, asking = self.connect_timeout, self.rank_state.timeout
        client = in_time(lambda: self.connect(manager_address, connecting), connecting, self.check_peers)
        return in_time(lambda: self._ask(client, asking), asking, self.check_peers)

    def _ask(self, client: ManagerClient, timeout: timedelta) -> str:
        """Requests the address of a state. The client closes its connection when it is garbage collected."""
        return client._checkpoint_metadata(self.group_rank, timeout=timeout)
