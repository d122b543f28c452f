"""Hears from the lighthouse of members that died, before anybody runs into it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Optional

from torchft import _torchft
from torchft._torchft import MemberFailure

_logger = logging.getLogger("torchft.manager")

# After this long without a failure the wait for one begins anew; nothing depends on it.
_LONGEST_WAIT = timedelta(hours=1)


class PeerFailed(RuntimeError):
    """A collective was given up because a peer of it died."""

    def __init__(self, failure: MemberFailure) -> None:
        super().__init__(f"{failure.replica_id} of quorum {failure.quorum_id} failed: {failure.reason}")
        self.failure = failure


class FailureListener:
    """Speaks with the lighthouse about failures, until the client is shut down: listens on a thread of its own.

    The thread is a daemon, as that of the quorum is: it must not keep a process from ending.

    Args:
        client: of this rank's manager server; with one that only stands in for ours nothing is said or heard.
        group_rank: of this rank.
        died: called for each member that died; what it raises is logged.
        stalled: called for each member that makes no progress while the others wait for it.
        progress: tells whether this rank waits for other groups, and what it does, when the lighthouse asks.
    """

    def __init__(
        self,
        client: Any,
        group_rank: int,
        died: Callable[[MemberFailure], None],
        stalled: Callable[[MemberFailure], None],
        progress: Callable[[], tuple[bool, str]],
    ) -> None:
        self._client = client
        self._group_rank = group_rank
        self._about = {"died": died, "stalled": stalled}
        self._progress = progress
        self._thread: Optional[threading.Thread] = None
        if type(client) is _torchft.ManagerClient:
            self._thread = threading.Thread(target=self._run, name="torchft_failures", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Returns when the thread has ended; shut the client down before."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def suspect(self, quorum_id: int, others: list[str]) -> None:
        """Tells that a collective failed; whom to suspect is known only where there is one other group."""
        if self._thread is None or not others:
            return
        try:
            self._client._suspect(quorum_id, others[0] if len(others) == 1 else "")
        except RuntimeError as e:  # the client is shut down
            _logger.debug("a suspicion was not told: %s", e)

    def _run(self) -> None:
        while True:
            try:
                notice = self._client._wait_notice(_LONGEST_WAIT)
            except Exception:  # the client is shut down
                return
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
