"""A lock with which a test waits until a thread waits for it."""

from __future__ import annotations

import threading


class Contended:
    """A lock that sets an event when a thread has to wait for it."""

    def __init__(self, waits: threading.Event) -> None:
        self._lock, self._waits = threading.Lock(), waits

    def acquire(self, blocking: bool = True) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        self._waits.set()
        assert self._lock.acquire(timeout=30)
        return True

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
