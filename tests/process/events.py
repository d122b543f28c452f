"""Communication with a child process in JSON, one object per line: events on stdout and commands on stdin."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

_stdout_lock = threading.Lock()


def emit(event: str, **fields: Any) -> None:
    """Print one event for the parent."""
    line = json.dumps({"event": event, **fields})
    with _stdout_lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def keep_stdout_for_events() -> None:
    """Redirects all other output of this process to stderr.

    A line of more than 4 KB is written in parts: the log of a native library could come in between.
    """
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


class Commands:
    """The parent's commands, read by a thread. The thread ends this process when the parent has ended."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="commands", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._queue.put(json.loads(line))
        os._exit(3)

    def next(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for a command. Raises queue.Empty after ``timeout`` seconds; without it, waits without
        limit.
        """
        return self._queue.get(timeout=timeout)

    def poll(self) -> dict[str, Any] | None:
        """Return the next command if there is one."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None
