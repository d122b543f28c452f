"""Reports the progress of a transfer: to a watcher, and by a log line every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable, Optional

_LOG_EVERY = 5.0  # seconds
_REPORT_EVERY = 0.5


Watcher = Callable[[int, int], None]
_watchers = threading.local()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Transfers that this thread begins in the block call ``watcher(received, total)`` twice a second."""
    before = getattr(_watchers, "watcher", None)
    _watchers.watcher = watcher
    try:
        yield
    finally:
        _watchers.watcher = before


class TransferProgress:
    """Receives the progress of a transfer, and logs it from time to time.

    Args:
        clock: returns seconds
    """

    def __init__(self, what: str, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._log = log
        self._clock = clock
        self._start = self._logged = clock()
        self._watcher: Optional[Watcher] = getattr(_watchers, "watcher", None)
        self._reported = float("-inf")
        self._lock = threading.Lock()  # guards the counts of several streams
        self._received = self._total = 0

    def expect(self, nbytes: int) -> None:
        """Adds to the number of announced bytes; may be called on any thread."""
        with self._lock:
            self._total += nbytes

    def count(self, nbytes: int) -> None:
        """Adds to the number of received bytes; may be called on any thread."""
        with self._lock:
            self.update(self._received + nbytes, max(self._received + nbytes, self._total))

    def update(self, received: int, total: int) -> None:
        """Reports the bytes that have arrived and the total, unless it did so just before."""
        now, self._received = self._clock(), received
        if self._watcher is not None and now - self._reported >= _REPORT_EVERY:
            self._reported = now
            self._watcher(received, total)
        if now - self._logged >= _LOG_EVERY:
            self._logged = now
            self._log.info("%s: %s", self._what, describe(received, total, now - self._start))

    def done(self, digest: str = "") -> None:
        """Logs `3.400 GB in 5.20 s, 0.65 GB/s`, once everything has arrived."""
        gigabytes, seconds = self._received / 1e9, self._clock() - self._start
        text = f"{gigabytes:.3f} GB in {seconds:.2f} s, {gigabytes / max(seconds, 1e-9):.2f} GB/s"
        self._log.info("%s: %s%s", self._what, text, digest and f", digest {digest}")


def describe(received: int, total: int, seconds: float) -> str:
    """`1.2 of 3.4 GB, 0.60 GB/s, 4 s left`"""
    rate = received / seconds if seconds > 0 else 0.0
    left = f"{(total - received) / rate:.0f} s left" if rate > 0 else "no data yet"
    return f"{received / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left}"
