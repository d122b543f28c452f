"""Failures of peers that the lighthouse reports. They end the collectives that would wait for those peers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Optional

from torchft._manager.observe import hangs
from torchft._torchft import MemberFailure

if TYPE_CHECKING:
    from torchft._manager.edge import Peers
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.rank import RankState
    from torchft._manager.step.background import Background
    from torchft._manager.step.collectives import Collectives
    from torchft._manager.step.errors import Errors

_logger = logging.getLogger("torchft.manager")

# How long a step's collectives may take to end after the failure of a member that has done its part.
_REMAINDER_SEC = 1.0
# Seconds between two looks whether they have.
_LOOK_SEC = 0.001
# Seconds between two attempts to abort a process group while it connects.
_ABORT_AGAIN_SEC = 0.05

FailureCallback = Callable[[MemberFailure], None]


class PeerFailed(RuntimeError):
    """A collective was aborted because one of its peers failed."""

    def __init__(self, failure: MemberFailure) -> None:
        super().__init__(f"{failure.replica_id} of quorum {failure.quorum_id} failed: {failure.reason}")
        self.failure = failure


class Failures:
    """The failures that the lighthouse reported for the quorum of this rank. A failure ends the collectives,
    or the connecting, that would wait for the failed member.

    Attributes:
        enabled: whether failures end anything (``enable_error_bus``).
        known: the failed members by quorum, for this quorum and later ones: a notice may arrive before its
            quorum does.
    """

    def __init__(
        self,
        enabled: bool,
        *,
        rank_state: RankState,
        peers: Peers,
        errors: Errors,
        background: Background,
        logger: _ManagerLogger,
    ) -> None:
        self.enabled = enabled
        self._rank_state = rank_state
        self._process_group = peers
        self._errors = errors
        self._background = background
        self._logger = logger
        # Held while a failure ends the collectives of a step, and while a quorum is followed. Otherwise a
        # failure of an old quorum could end the collectives of a step with other peers.
        self._lock = threading.Lock()
        self._quorum_id = -1  # the present quorum
        self._connecting = False  # whether the process group is connecting now
        # The members that this rank reduces with; None: all of the quorum.
        self._peers: Optional[frozenset[str]] = None
        self.known: dict[int, list[MemberFailure]] = {}
        self._callbacks: list[FailureCallback] = []

    def subscribe(self, callback: FailureCallback) -> None:
        """Calls ``callback(failure)`` for each failure, on a separate thread."""
        self._callbacks.append(callback)

    @contextmanager
    def connecting(self, quorum_id: int) -> Iterator[None]:
        """Surrounds the connecting of the process group with the members of a new quorum."""
        self.follow(quorum_id)
        self._connecting = True  # a failure that was reported before this line is found by `check`
        try:
            yield
        finally:
            self._connecting = False

    def follow(self, quorum_id: int, peers: Optional[Iterable[str]] = None) -> None:
        """Makes failures in a new quorum count. `peers`: the members that this rank reduces with, if these
        are not all; a failure of another member ends nothing.
        """
        with self._lock:
            self._quorum_id = quorum_id
            self._peers = None if peers is None else frozenset(peers)
            self.known = {q: failures for q, failures in self.known.items() if q >= quorum_id}

    def reported(self, quorum_id: int) -> list[MemberFailure]:
        """The known failed members of a quorum; none with ``enable_error_bus`` off."""
        return list(self.known.get(quorum_id, ()))

    def check(self) -> None:
        """Raises PeerFailed if a member of the quorum that this rank reduces with is known to have failed."""
        for failure in self.known.get(self._quorum_id, ()):
            if self._is_peer(failure) and not self._has_done_its_part(failure):
                raise PeerFailed(failure)

    def _is_peer(self, failure: MemberFailure) -> bool:
        return self._peers is None or failure.replica_id in self._peers

    def member_failed(self, failure: MemberFailure) -> None:
        """Ends what waits for a peer that failed, and calls the subscribers. An exception of one is logged,
        so that the others are still called.
        """
        if not self.enabled:
            return
        self._background.enter_thread()
        for handle in (self._end_collectives, self._end_connecting, *self._callbacks):
            try:
                handle(failure)
            except Exception as e:
                self._logger.exception(f"the failure of {failure.replica_id} could not be handled: {e}")

    def _end_collectives(self, failure: MemberFailure) -> None:
        """Ends the running collectives and transfers of the step. If all have ended, their results are
        complete on this rank and the failure changes nothing: the step may be committed. Those of which the
        member has done its part have time to end: while a quorum stands, a member may be one step ahead.
        """
        with self._lock:
            if failure.quorum_id >= self._quorum_id:  # one of a later quorum: `check` finds it there
                self.known.setdefault(failure.quorum_id, []).append(failure)
        until = time.monotonic() + _REMAINDER_SEC
        while self._has_done_its_part(failure) and self._running() and time.monotonic() < until:
            time.sleep(_LOOK_SEC)
        with self._lock:
            mine = failure.quorum_id == self._quorum_id and self._is_peer(failure)
            collectives = self._errors.step.collectives
            if mine and not self._connecting and self._running():
                error = PeerFailed(failure)
                self._logger.warn(str(error))
                self._errors.of_collective(error, collectives)

    def _running(self) -> bool:
        return self._errors.step.collectives.running() is not None or self._background.busy()

    def _has_done_its_part(self, failure: MemberFailure) -> bool:
        """Whether a member of the present quorum has failed after its part of the step in progress."""
        # Not the step of the plan: while the quorum stands, that is the one in which it began.
        plan = self._errors.step.plan
        return (
            plan is not None and failure.quorum_id == plan.quorum_id and self._rank_state.step < failure.step
        )

    def _end_connecting(self, failure: MemberFailure) -> None:
        # Repeated: an abort that comes before the process group has begun to connect ends nothing.
        while self._connecting and failure.quorum_id == self._quorum_id:
            self._process_group.abort()
            time.sleep(_ABORT_AGAIN_SEC)

    def stalled(self, failure: MemberFailure) -> None:
        """A member makes no progress while others wait. If it is this group, each rank says where it is."""
        self._logger.warn(f"{failure.replica_id} of quorum {failure.quorum_id} is stalled: {failure.reason}")
        if failure.replica_id == self._logger.replica_id:
            self._logger.stalled(hangs.awaited(), hangs.stacks())

    def regressed(self, of: MemberFailure) -> None:
        """Groups that had reached a later step are missing, and the others continue from an earlier one."""
        self._logger.warn(
            f"THE JOB REGRESSES in quorum {of.quorum_id}: the weights of later steps are lost unless their "
            f"groups come back: {of.reason}"
        )

    def progress(self) -> tuple[bool, str, str]:
        """Whether this rank waits for other groups, what it does, and its phase, as named in the proto; empty
        if that is a step. The lighthouse asks only if a step takes long.
        """
        self._background.enter_thread()
        step = self._errors.step
        waits, what, phase = self._doing(step.collectives)
        return waits, what, phase or ("" if waits else hangs.seen(step.thread, between=not step.undecided))

    def _doing(self, collectives: Collectives) -> tuple[bool, str, str]:
        running = collectives.running()
        # On the training thread: no call comes before it ends.
        if function := self._rank_state.activity(waits=False):
            return False, function.what, function.phase
        if self._connecting:
            return True, "connects with its peers", ""
        if running is not None:
            return True, f"waits for its peers in collective {running} of this step", ""
        if wait := self._rank_state.activity(waits=True):
            return True, wait.what, wait.phase
        if self._background.busy():
            return True, "waits for its device to send or receive a state", ""
        return False, f"computes, after {len(collectives)} collectives of this step", ""
