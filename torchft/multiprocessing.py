"""Pipes between processes, with deadlines."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


class _MonitoredPipe:
    """One end of a pipe, which this object closes. The process at the other end may end, stall or fail."""

    def __init__(self, pipe: Connection[object, object]) -> None:
        self._pipe = pipe

    def send(self, obj: object) -> None:
        """Sends an object; an exception is raised at the other end. OSError: the pipe is closed."""
        self._pipe.send(obj)

    def recv(self, timeout: Union[float, timedelta]) -> object:
        """Receives an object.

        Args:
            timeout: seconds, or a timedelta.

        Raises:
            TimeoutError: nothing arrived in time.
            EOFError: the other end is closed, or its process has ended.
            OSError: this end is closed.
            Exception: an exception that the other end has sent.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        # None and negative numbers would mean no timeout.
        if not self._pipe.poll(max(0.0, seconds)):
            raise TimeoutError(f"pipe.recv() timed out after {seconds} seconds")
        obj = self._pipe.recv()
        if isinstance(obj, Exception):
            raise obj
        return obj

    def close(self) -> None:
        """Closes this end."""
        self._pipe.close()

    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._pipe.closed
