"""Shows how far a transfer is: a bar on a terminal, a line in the log every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from typing import Callable, Optional, TextIO

_LOG_EVERY = 5.0  # seconds
_BAR_EVERY = 0.2
_QUIET = 1.0  # seconds that a transfer takes before anything is shown
_WIDTH = 30  # characters


class Progress:
    """Told of every state of a transfer, shows some of them.

    Args:
        what: names the transfer
        log: gets the lines
        terminal: gets the bar; default: standard error, if that is a terminal
        clock: seconds
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

    def update(self, received: int, total: int) -> None:
        """Shows this state, if it is time: bytes that have arrived, and all bytes."""
        now = self._clock()
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

    def close(self) -> None:
        """Takes the bar away."""
        if self._has_bar and self._terminal is not None:
            self._terminal.write("\r\x1b[K")
            self._terminal.flush()
            self._has_bar = False


def describe(received: int, total: int, seconds: float) -> str:
    """`1.2 of 3.4 GB, 0.60 GB/s, 4 s left`"""
    rate = received / seconds if seconds > 0 else 0.0
    left = f"{(total - received) / rate:.0f} s left" if rate > 0 else "no data yet"
    return f"{received / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left}"
