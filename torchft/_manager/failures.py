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
    """Calls back for each failure, on a thread of its own, until the client is shut down.

    The thread is a daemon, as that of the quorum is: it must not keep a process from ending.

    Args:
        client: of this rank's manager server; one that only stands in for ours hears nothing.
        callback: what it raises is logged.
    """

    def __init__(self, client: Any, callback: Callable[[MemberFailure], None]) -> None:
        self._client = client
        self._callback = callback
        self._thread: Optional[threading.Thread] = None
        if type(client) is _torchft.ManagerClient:
            self._thread = threading.Thread(target=self._run, name="torchft_failures", daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Returns when the thread has ended; shut the client down before."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                failure = self._client._wait_failure(_LONGEST_WAIT)
            except Exception:  # the client is shut down
                return
            if failure is None:
                continue
            try:
                self._callback(failure)
            except Exception:
                _logger.exception("a callback for failures failed")
