"""Completes the futures of operations, on a thread that starts when the first future is requested."""

from __future__ import annotations

import logging
import threading
from typing import Callable, ContextManager, Optional

from torchft.process_group.isolated.operation import _OpMetadata
from torchft.utils import DeviceThread

_logger: logging.Logger = logging.getLogger(__name__)


class Completer:
    """Callbacks run on its thread, one after another.

    Args:
        name: name of the group.
        lock: the channel's lock. `begin`, `wake` and `ended` are called with it.
        lead: reads answers until its argument is true; False at once if another thread reads, or no future is open.
        broken: whether the channel is closed, after which no operation ends.
        follow: makes the current stream, or the host, wait for an operation that has ended; raises its error.
    """

    def __init__(
        self,
        name: str,
        lock: ContextManager[object],
        lead: Callable[[Callable[[], bool]], bool],
        broken: Callable[[], bool],
        follow: Callable[[_OpMetadata], None],
    ) -> None:
        self._name = name
        self._lock = lock
        self._lead = lead
        self._broken = broken
        self._follow = follow
        # Operations that have ended, whose future is still to be completed.
        self._ended: list[_OpMetadata] = []
        self._thread: Optional[threading.Thread] = None
        # Held while the thread has nothing to do.
        self._idle = threading.Lock()

    def begin(self) -> None:
        """Called when there is a future to wait for."""
        if self._thread is None:
            self._thread = DeviceThread(target=self._run, name="torchft_isolated_futures")
            self._thread.start()
        else:
            self.wake()

    def wake(self) -> None:
        if self._idle.locked():
            self._idle.release()

    def ended(self, op: _OpMetadata) -> None:
        """Called when an operation with a future has ended."""
        self._ended.append(op)
        # Restarts the thread, which may have ended if the worker failed at this moment.
        self.begin()

    def _run(self) -> None:
        while True:
            with self._lock:
                ended, self._ended = self._ended, []
                if not ended:
                    # Taken before the checks below, so that a `wake` after them is not lost: it releases this lock.
                    self._idle.acquire(blocking=False)
            if ended:
                for op in ended:
                    self.complete(op)
                # These names would keep the operations' tensors alive until the next operations end.
                del ended, op
            elif not self._lead(lambda: bool(self._ended)):
                with self._lock:
                    if self._broken() and not self._ended:
                        self._thread = None
                        return
                self._idle.acquire()

    def complete(self, op: _OpMetadata) -> None:
        """Completes the future of an operation that has ended."""
        metadata = op.future
        assert metadata is not None
        error = op.error
        try:
            with metadata.set_stream():
                if error is None and op.marks:
                    try:
                        self._follow(op)
                    except Exception as e:
                        error = e
                if error is None:
                    metadata.future.set_result(op.result)
                else:
                    # pyrefly: ignore [bad-argument-type]  # typed as a result
                    metadata.future.set_exception(error)
        except Exception:
            # A callback that raises fails the future that it made, not this one.
            _logger.exception("%s: could not complete a future", self._name)
