"""The interface of a consensus for FTLib, and its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol

from torchft.ftlib.views import Identity, View


class ConsensusStatus(Enum):
    """The results of ``confirm``."""

    SUCCESS = "success"  # the last list of members still holds
    FAIL = "fail"  # the list does not hold: a member joined or failed
    SKIP_ALLREDUCE = "skip_allreduce"  # the list holds, and this member is the only one


class FTAllReduceStatus(Enum):
    """The results of an average."""

    NO_NEED = "no_need"  # this member is the only one, so its values are the average
    SUCCESS = "success"
    FAIL = "fail"  # a collective or a rebuild failed, and the values are invalid; see ``FTLib.error``
    # nothing was averaged, because members and perhaps the state have changed; compute the values again
    ABORT = "abort"


class Listener(Protocol):
    """Receives reports from a consensus. Both methods return at once, and may be called from any thread."""

    def new_member_join(self) -> None:
        """Reports a process that wants to become a member."""

    def member_failed(self, view: int, reason: str) -> None:
        """Reports that a member of the view with this number, perhaps this one, has failed or left."""


class Consensus(ABC):
    """Agrees with the other members on the list of members.

    FTLib calls ``confirm`` of an active consensus, at most once between two collectives. A passive consensus
    notifies its listener instead, and its ``confirm`` is never called.
    """

    active: bool = False
    identity: Identity

    @abstractmethod
    def get_member_list(self) -> View:
        """Waits for a view, all members of which call this, and returns it. A communicator of the view exists
        only if all of them connect.

        This confirms the view. Its number is new, even if the members are those of the last view.

        Raises:
            TimeoutError: there was no view within the timeout of the consensus; the text names what is
                missing.
        """

    def confirm(self) -> ConsensusStatus:
        """Whether the last list holds, for active consensuses. If not, ``get_member_list`` is called next."""
        raise NotImplementedError(f"{type(self).__name__}.confirm: a passive consensus is not asked")

    @abstractmethod
    def attach(self, listener: Listener) -> None:
        """Sets the receiver of the reports: once, before anything else."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. Safe to call twice."""
