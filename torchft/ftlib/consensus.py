"""The interface of a consensus for FTLib, and its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Protocol

from torchft.ftlib.views import Identity, View


class ConsensusStatus(Enum):
    """Answers of ``confirm``."""

    SUCCESS = "success"  # the last list of members holds
    FAIL = "fail"  # it does not: a member joined or was lost
    SKIP_ALLREDUCE = "skip_allreduce"  # it holds, and this member is alone in it


class FTAllReduceStatus(Enum):
    """Results of an average."""

    NO_NEED = "no_need"  # this member is alone: its values are the average
    SUCCESS = "success"
    FAIL = "fail"  # a collective or a rebuild failed: the values are of no use, see ``FTLib.error``
    ABORT = "abort"  # nothing was averaged: there are new members, and perhaps another state; compute the values again


class Listener(Protocol):
    """Whom a consensus tells what happens. Both calls return at once, and may come from any thread."""

    def new_member_join(self) -> None:
        """A process wants to become a member."""

    def member_lost(self, view: int, reason: str) -> None:
        """A member of the view with this number is lost, or this one is no longer of it."""


class Consensus(ABC):
    """Agrees with the other members on who they are.

    An active one is asked: FTLib calls ``confirm`` at most once between two collectives. A passive one is never asked
    whether its list holds; it tells its listener.
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
        """Whether the last list of members holds. After FAIL, ``get_member_list`` is called. Active ones only."""
        raise NotImplementedError(f"{type(self).__name__}.confirm: a passive consensus is not asked")

    @abstractmethod
    def attach(self, listener: Listener) -> None:
        """Called once, before anything else."""

    @abstractmethod
    def close(self) -> None:
        """Leaves. Safe to call twice."""
