"""Failures of peers, as the lighthouse tells them before anybody runs into one, and what they end here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from torchft._torchft import ManagerClient, MemberFailure

if TYPE_CHECKING:
    from torchft._manager.collectives import Collectives
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.step import Step

_logger = logging.getLogger("torchft.manager")

# After this long without a failure the wait for one begins anew; nothing depends on it.
_LONGEST_WAIT = timedelta(hours=1)
# After a notice that could not be read: so errors that do not end fill no disk.
_LISTEN_AGAIN_SEC = 1.0
# Between two aborts of a group that connects.
_ABORT_AGAIN_SEC = 0.05

FailureCallback = Callable[[MemberFailure], None]


class PeerFailed(RuntimeError):
    """A collective was given up because a peer of it failed."""

    def __init__(self, failure: MemberFailure) -> None:
        super().__init__(f"{failure.replica_id} of quorum {failure.quorum_id} failed: {failure.reason}")
        self.failure = failure


class FailureListener:
    """Speaks with the lighthouse about failures, until the client is shut down: listens on a thread of its own.

    The thread is a daemon, as that of the quorum is: it must not keep a process from ending.

    Args:
        client: of this rank's manager server.
        group_rank: of this rank.
        failed: called for each member that failed; what it raises is logged.
        stalled: called for each member that makes no progress while the others wait for it.
        progress: tells whether this rank waits for other groups, and what it does, when the lighthouse asks.
    """

    def __init__(
        self,
        client: ManagerClient,
        group_rank: int,
        failed: Callable[[MemberFailure], None],
        stalled: Callable[[MemberFailure], None],
        progress: Callable[[], tuple[bool, str]],
    ) -> None:
        self._client = client
        self._group_rank = group_rank
        self._about = {"failed": failed, "stalled": stalled}
        self._progress = progress
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchft_failures", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The client is about to be shut down: that ends the thread."""
        self._ending.set()

    def join(self) -> None:
        """Returns when the thread has ended; shut the client down before."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                notice = self._client._wait_notice(_LONGEST_WAIT)
            except RuntimeError as e:  # the client is shut down: by `end`, or by somebody else
                if not self._ending.is_set():
                    _logger.warning("no more notices of the lighthouse are heard: %s", e)
                return
            except Exception:
                _logger.exception("a notice of the lighthouse could not be read")
                if self._ending.wait(_LISTEN_AGAIN_SEC):
                    return
                continue
            if notice is None:
                continue
            kind, failure = notice
            try:
                if kind == "progress":
                    self._client._say_progress(self._group_rank, *self._progress())
                else:
                    self._about[kind](failure)
            except Exception:
                _logger.exception("a notice of the lighthouse could not be taken")


class Failures:
    """What the lighthouse told of the quorum that this rank is in, and the end of what waits for them.

    Args:
        enabled: whether a failure ends anything here (``enable_error_bus``).
        step: the one before the first.
        abort: aborts the process group, in whatever it does.
        report: learns of the error that a failure is to the collectives that run, and of which step they are.
        fetching: whether this rank waits for the state of a peer.
        transferring: whether a device has still to send or receive a state.
        logger: of the Manager.
    """

    def __init__(
        self,
        enabled: bool,
        step: Step,
        *,
        abort: Callable[[], None],
        report: Callable[[Exception, Collectives], None],
        fetching: Callable[[], bool],
        transferring: Callable[[], bool],
        logger: _ManagerLogger,
    ) -> None:
        self.enabled = enabled
        self._step = step
        self._abort = abort
        self._report = report
        self._fetching = fetching
        self._transferring = transferring
        self._logger = logger
        # Held while the collectives of a step are ended for a failure, and while a step begins: so those of the next
        # step are never ended for it.
        self._lock = threading.Lock()
        self._quorum_id = -1  # that is followed
        self._connecting = False  # the process group gets the peers of that quorum
        # Of each quorum that is followed, or may be yet, the first member that failed.
        self._told: dict[int, MemberFailure] = {}
        self._callbacks: list[FailureCallback] = []

    def begin(self, step: Step) -> None:
        """A step begins: what is told from now on is about its collectives."""
        with self._lock:
            self._step = step

    def subscribe(self, callback: FailureCallback) -> None:
        """Calls ``callback(failure)`` for each failure, on a thread of its own."""
        self._callbacks.append(callback)

    @contextmanager
    def connecting(self, quorum_id: int) -> Iterator[None]:
        """While the process group gets the peers of a new quorum."""
        with self._lock:
            self._quorum_id = quorum_id
            self._connecting = True
            self._told = {q: failure for q, failure in self._told.items() if q >= quorum_id}
        try:
            yield
        finally:
            self._connecting = False

    def check(self) -> None:
        """Raises PeerFailed if a member of the present quorum is known to have failed."""
        failure = self._told.get(self._quorum_id)
        if failure is not None:
            raise PeerFailed(failure)

    def member_failed(self, failure: MemberFailure) -> None:
        """Ends what waits for a peer that failed, and tells the subscribers. What one of them raises is logged, and
        the others hear of it all the same.
        """
        if not self.enabled:
            return
        for tell in (self._end_collectives, self._end_connecting, *self._callbacks):
            try:
                tell(failure)
            except Exception as e:
                self._logger.exception(f"the failure of {failure.replica_id} could not be taken: {e}")

    def _end_collectives(self, failure: MemberFailure) -> None:
        """A step whose collectives and transfers have all ended is none the worse for a failure."""
        with self._lock:
            if failure.quorum_id >= self._quorum_id:  # one that is to come is looked at when it is followed
                self._told.setdefault(failure.quorum_id, failure)
            mine = failure.quorum_id == self._quorum_id
            collectives = self._step.collectives
            running = collectives.running() is not None
            if mine and not self._connecting and (running or self._transferring()):
                error = PeerFailed(failure)
                self._logger.warn(str(error))
                self._report(error, collectives)

    def _end_connecting(self, failure: MemberFailure) -> None:
        # An abort that comes before the group has begun to connect finds nothing to end.
        while self._connecting and failure.quorum_id == self._quorum_id:
            self._abort()
            time.sleep(_ABORT_AGAIN_SEC)

    def stalled(self, failure: MemberFailure) -> None:
        """A peer makes no progress while the others wait for it."""
        self._logger.warn(f"{failure.replica_id} of quorum {failure.quorum_id} is stalled: {failure.reason}")

    def progress(self) -> tuple[bool, str]:
        """Whether this rank waits for other groups, and what it does; asked only when a step takes very long."""
        collectives = self._step.collectives
        running = collectives.running()
        if self._connecting:
            return True, "connects with its peers"
        if running is not None:
            return True, f"waits for its peers in collective {running} of this step"
        if self._fetching():
            return True, "fetches the state of a peer"
        if self._transferring():
            return True, "waits for its device to send or receive a state"
        return False, f"computes, after {len(collectives)} collectives of this step"
