"""The edge: what may be another project's, as the parts of the Manager want it.

What it can do is asked here, where the Manager is made. Behind the edge nobody asks again. Through a client that has
the published methods only, nothing else is said to the manager server, and nothing else is heard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torchft import _torchft
from torchft._manager.failures import FailureListener
from torchft._manager.rounds import NativeRounds, Rounds, ThreadRounds
from torchft._torchft import MemberFailure, QuorumResult

_logger = logging.getLogger("torchft.manager")

# Fields of a quorum's result that other clients' results have too.
_PUBLISHED_FIELDS = (
    "quorum_id",
    "replica_rank",
    "replica_world_size",
    "recover_src_manager_address",
    "recover_src_replica_rank",
    "recover_dst_replica_ranks",
    "store_address",
    "max_step",
    "max_replica_rank",
    "max_world_size",
    "heal",
    "commit_failures",
    "replica_ids",
    "reconfigure_handles",
)


class Server:
    """The manager server of a rank's group, through any client.

    Args:
        client: has the methods of the published ``ManagerClient``.
        group_rank: of this rank.

    Attributes:
        client: may be replaced.
    """

    def __init__(self, client: Any, group_rank: int) -> None:
        self.client = client
        self._group_rank = group_rank

    def rounds(self) -> Rounds:
        """What asks for quorums."""
        return ThreadRounds(lambda **request: _whole(self.client._quorum(**request)))

    def vote(self, step: int, yes: bool, timeout: timedelta) -> bool:
        """Whether all ranks of the group vote yes."""
        return self.client.should_commit(self._group_rank, step, yes, timeout=timeout)

    def leave(self, timeout: timedelta) -> None:
        """Says that this group has ended its last step, and waits until no other group needs it any more."""
        if hasattr(self.client, "_leave"):
            self.client._leave(timeout)

    def close(self) -> None:
        """Ends the client, and all that waits for an answer."""
        if hasattr(self.client, "shutdown"):
            self.client.shutdown()

    def listen(
        self,
        died: Callable[[MemberFailure], None],
        stalled: Callable[[MemberFailure], None],
        progress: Callable[[], tuple[bool, str]],
    ) -> None:
        """Begins to hear of other members: see :class:`FailureListener`."""

    def join(self) -> None:
        """Returns when nothing more is heard; close the client before."""

    def suspect(self, quorum_id: int, others: list[str]) -> None:
        """Tells that a collective with these groups failed; whom to suspect is known only where there is one."""

    def trace(self, traceparent: str) -> None:
        """The W3C trace context of the step whose quorum is asked for next."""

    def say(self, call: str, *args: Any, **kwargs: Any) -> None:
        """Tells what people want to see, by a method of the client; nothing depends on it."""


class _NativeServer(Server):
    """The same, through torchft's own client."""

    _listener: FailureListener | None = None

    def rounds(self) -> Rounds:
        return NativeRounds(self.client)

    def listen(
        self,
        died: Callable[[MemberFailure], None],
        stalled: Callable[[MemberFailure], None],
        progress: Callable[[], tuple[bool, str]],
    ) -> None:
        self._listener = FailureListener(self.client, self._group_rank, died, stalled, progress)

    def join(self) -> None:
        if self._listener is not None:
            self._listener.join()

    def suspect(self, quorum_id: int, others: list[str]) -> None:
        if others:
            self._tell(self.client._suspect, quorum_id, others[0] if len(others) == 1 else "")

    def trace(self, traceparent: str) -> None:
        self.client._trace(traceparent)

    def say(self, call: str, *args: Any, **kwargs: Any) -> None:
        self._tell(getattr(self.client, call), self._group_rank, *args, **kwargs)

    def _tell(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except RuntimeError as e:  # the client is shut down
            _logger.debug("not told: %s", e)


def connect_server(
    make: Callable[..., Any], address: str, *, group_rank: int, group_world_size: int, timeout: timedelta
) -> Server:
    """Connects with the manager server of this rank's group.

    Args:
        make: makes the client; torchft's own also says how many ranks it believes the group to have, and is refused if
            rank 0 has another number.
        address: of the server.
        group_rank, group_world_size: of this rank.
        timeout: for reaching the server.
    """
    said = {"group_world_size": group_world_size} if make is _torchft.ManagerClient else {}
    return as_server(make(address, connect_timeout=timeout, **said), group_rank)


def as_server(client: Any, group_rank: int) -> Server:
    """The manager server behind a client."""
    return (_NativeServer if type(client) is _torchft.ManagerClient else Server)(client, group_rank)


def _whole(result: Any) -> QuorumResult:
    """A quorum's result with all fields; one of another class has the published ones."""
    if type(result) is QuorumResult:
        return result
    return QuorumResult(**{name: getattr(result, name) for name in _PUBLISHED_FIELDS if hasattr(result, name)})
