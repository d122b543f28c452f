"""A lock for many readers or one writer, with a timeout for each acquisition."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import Callable, Generator


class RWLock:
    """Any number of readers, or one writer. Readers come first: a writer waits until the last reader has
    left.

    It does not belong to a thread: one thread may acquire and another release. It is not reentrant.

    Args:
        timeout: limit for every acquisition in seconds; -1: none
    """

    def __init__(self, timeout: float = -1) -> None:
        if timeout < 0 and timeout != -1:
            raise ValueError(f"timeout is {timeout}: allowed are seconds >= 0, or -1 for no limit")
        self.timeout = timeout
        self._cond = threading.Condition(threading.Lock())
        self._readers = 0
        self._writing = False

    def _wait_for(self, free: Callable[[], bool], wanted: str) -> None:
        start = time.monotonic()
        if not self._cond.wait_for(free, None if self.timeout < 0 else self.timeout):
            held = "a writer" if self._writing else f"{self._readers} reader(s)"
            waited = time.monotonic() - start
            raise TimeoutError(
                f"timed out: no {wanted} lock after {waited:.3f} s (timeout {self.timeout} s): held by {held}"
            )

    def r_acquire(self) -> None:
        """Acquires the lock as a reader; raises TimeoutError if a writer holds it for too long."""
        with self._cond:
            self._wait_for(lambda: not self._writing, "read")
            self._readers += 1

    def r_release(self) -> None:
        with self._cond:
            if self._readers == 0:
                raise RuntimeError("r_release: no reader holds the lock")
            self._readers -= 1
            if self._readers == 0:
                self._cond.notify_all()

    @contextmanager
    def r_lock(self) -> Generator[None, None, None]:
        self.r_acquire()
        try:
            yield
        finally:
            self.r_release()

    def w_acquire(self) -> None:
        """Acquires the lock as the writer; raises TimeoutError if it is held for too long."""
        with self._cond:
            self._wait_for(lambda: not self._writing and self._readers == 0, "write")
            self._writing = True

    def w_release(self) -> None:
        with self._cond:
            if not self._writing:
                raise RuntimeError("w_release: no writer holds the lock")
            self._writing = False
            self._cond.notify_all()

    @contextmanager
    def w_lock(self) -> Generator[None, None, None]:
        self.w_acquire()
        try:
            yield
        finally:
            self.w_release()

    def w_locked(self) -> bool:
        """Whether a writer holds the lock now."""
        with self._cond:
            return self._writing
