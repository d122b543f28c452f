"""The interface of a consensus for FTLib, and its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol

from torchft.ftlib.views import Identity, View


class ConsensusStatus(Enum):
    """The answers of ``confirm``."""

    SUCCESS = "success"  # the last list of members still holds
    FAIL = "fail"  # it does not hold: a member joined or failed
    SKIP_ALLREDUCE = "skip_allreduce"  # it holds, and this member is the only one


class FTAllReduceStatus(Enum):
    """The results of an average."""

    NO_NEED = "no_need"  # this member is the only one, so its values are the average
    SUCCESS = "success"
    FAIL = "fail"  # a collective or a rebuild failed, and the values are invalid; see ``FTLib.error``
    # nothing was averaged, because there are new members and perhaps another state; compute the values again
    ABORT = "abort"


class Listener(Protocol):
    """Receives reports from a consensus. Both methods return at once, and may be called from any thread."""

    def new_member_join(self) -> None:
        """Called when a process wants to become a member."""

    def member_failed(self, view: int, reason: str) -> None:
        """Called when a member of the view with this number, or this one itself, has failed or left."""


class Consensus(ABC):
    """Agrees with the other members on the list of members.

    An active one is asked: FTLib calls ``confirm`` at most once between two collectives. A passive one is never asked
    whether its list holds; it notifies its listener.
    """

    active: bool = False
    identity: Identity

    @abstractmethod
    def get_member_list(self) -> View:
        """Waits until all members of a view have asked for it, and gives that view.

        It confirms the view. Its number is a new one, even if the members are those of the last view.

        Raises:
            TimeoutError: there was none within the timeout of the consensus; the text says what is waited for.
        """

    def confirm(self) -> ConsensusStatus:
        """Whether the last list of members still holds. If not, ``get_member_list`` is called next.
        Active ones only.
        """
        raise NotImplementedError(f"{type(self).__name__}.confirm: a passive consensus is not asked")

    @abstractmethod
    def attach(self, listener: Listener) -> None:
        """Called once, before anything else."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the job. Safe to call twice."""
