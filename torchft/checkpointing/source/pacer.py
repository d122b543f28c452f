"""A limit for the bytes that several threads send together."""

from __future__ import annotations

import sys
import threading
import time

# Seconds that one piece takes at the limit. Threads take turns after each piece.
_PIECE_SEC = 0.1


class Pacer:
    """Delays threads so that together they do not send more than `limit` bytes per second; 0: no limit.
    `piece`: the bytes that a thread should send at once, at most.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self.piece = max(1, int(limit * _PIECE_SEC)) if limit else sys.maxsize
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the next bytes may be sent

    def wait(self, nbytes: int) -> None:
        """Waits for the time that the bytes of earlier calls take; the caller then sends these at once."""
        if not self._limit:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + nbytes / self._limit
        time.sleep(begin - now)
