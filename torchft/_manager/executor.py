"""One background thread for the quorum, which never keeps a process from ending."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import Callable, Optional, TypeVar

T = TypeVar("T")


class QuorumThread:
    """Runs one call after another on a daemon thread, which starts with the first call.

    Python joins the threads of its own executors before it exits: after Ctrl-C a process would so wait, alive to its
    peers, until the quorum's timeout.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Optional[tuple[Future, Callable[[], object]]]] = queue.SimpleQueue()
        self._thread: Optional[threading.Thread] = None
        self._closed = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call.

        Raises:
            RuntimeError: after shutdown.
        """
        if self._closed:
            raise RuntimeError("the Manager is shut down")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchft_quorum", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def shutdown(self, wait: bool) -> None:
        """Ends the thread after the calls that are queued.

        Args:
            wait: until it has ended.
        """
        self._closed = True
        self._calls.put(None)
        if wait and self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                result = call()
            except BaseException as e:
                future.set_exception(e)
            else:
                future.set_result(result)
            del item, future, call  # keep nothing of a step alive until the next one
