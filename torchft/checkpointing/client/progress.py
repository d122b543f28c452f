"""Shows the progress of a transfer: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable, Optional, TextIO

_LOG_EVERY = 5.0  # seconds
_BAR_EVERY = 0.2
_REPORT_EVERY = 0.5
_QUIET = 1.0  # seconds of a transfer before anything is shown
_WIDTH = 30  # characters


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
    """Receives the progress of a transfer, and shows it from time to time.

    Args:
        terminal: where the bar is shown; default: standard error, if that is a terminal
        clock: returns seconds
    """

    def __init__(
        self,
        what: str,
        log: logging.Logger,
        terminal: Optional[TextIO] = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._log = log
        if terminal is None and sys.stderr is not None and sys.stderr.isatty():
            terminal = sys.stderr
        self._terminal = terminal
        self._clock = clock
        self._start = self._shown = clock()
        self._has_bar = False
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
        """Shows the bytes that have arrived and the total, unless it did so just before."""
        now, self._received = self._clock(), received
        if self._watcher is not None and now - self._reported >= _REPORT_EVERY:
            self._reported = now
            self._watcher(received, total)
        every = _LOG_EVERY if self._terminal is None else _BAR_EVERY
        if now - self._start < _QUIET or now - self._shown < every:
            return
        self._shown = now
        text = describe(received, total, now - self._start)
        if self._terminal is None:
            self._log.info("%s: %s", self._what, text)
            return
        filled = _WIDTH * received // max(1, total)
        self._terminal.write(f"\r\x1b[Kheal [{'#' * filled}{'.' * (_WIDTH - filled)}] {text}")
        self._terminal.flush()
        self._has_bar = True

    def done(self, digest: str = "") -> None:
        """Logs `3.400 GB in 5.20 s, 0.65 GB/s`, once everything has arrived."""
        gigabytes, seconds = self._received / 1e9, self._clock() - self._start
        text = f"{gigabytes:.3f} GB in {seconds:.2f} s, {gigabytes / max(seconds, 1e-9):.2f} GB/s"
        self._log.info("%s: %s%s", self._what, text, digest and f", digest {digest}")

    def close(self) -> None:
        """Removes the bar."""
        if self._has_bar and self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._has_bar = False


def describe(received: int, total: int, seconds: float) -> str:
    """`1.2 of 3.4 GB, 0.60 GB/s, 4 s left`"""
    rate = received / seconds if seconds > 0 else 0.0
    left = f"{(total - received) / rate:.0f} s left" if rate > 0 else "no data yet"
    return f"{received / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left}"
