"""Notices of the lighthouse about members of the quorum, and its questions about this rank's progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torchft._torchft import ManagerClient
from torchft.utils import weakly

_logger = logging.getLogger("torchft.manager")

# The timeout of one call that waits for a notice; the call is repeated. Its length does not matter.
_LONGEST_WAIT = timedelta(hours=1)
# The pause after a notice that could not be read, so that a permanent error does not fill the disk.
_LISTEN_AGAIN_SEC = 1.0


class FailureListener:
    """Receives notices of the lighthouse on a separate thread, until the client is shut down, and answers
    questions about progress.

    The thread is a daemon, like that of the quorum: it must not keep a process from ending. Nor does it keep
    an object alive whose method it calls: it ends when such an object no longer exists.

    Args:
        client: client of this rank's manager server.
        group_rank: the number of this rank in its group.
        about: for each kind of notice, what is called with the member that it is about; its exceptions are
            logged. ``failed``: the member has failed; ``stalled``: it makes no progress while the others wait
            for it; ``regressed``: the quorum is below the step that the job had reached; ``judged``: the
            answer to an exception that this rank has reported; ``stopped``: the job stops. That of
            ``progress`` gets no argument, and returns whether this rank waits for other groups, what it does,
            and its phase, as named in the proto.
    """

    def __init__(
        self, client: ManagerClient, group_rank: int, about: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._client = client
        self._group_rank = group_rank
        self._about = {kind: weakly(call) for kind, call in about.items()}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchft_failures", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Announces that the client is shut down, which ends the thread silently."""
        self._ending.set()

    def join(self) -> None:
        """Waits until the thread has ended; shut the client down first."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            try:
                notice = self._client._wait_notice(_LONGEST_WAIT)
            except RuntimeError as e:  # the client is shut down; expected after `end`
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
            if kind not in self._about:
                continue
            about = self._about[kind]()
            if about is None:
                return
            try:
                if kind == "progress":
                    waits, what, phase = about()
                    said = {"waits": waits, "what": what, "phase": phase or "UNSAID"}
                    self._client._report(progress={"group_rank": self._group_rank, **said})
                else:
                    about(failure)
            except Exception:
                _logger.exception("a notice of the lighthouse could not be handled")
            del about  # keep nothing of a Manager alive until the next notice
