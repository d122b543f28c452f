"""Detects that an operation which has not ended does not write any more.

A send that Gloo takes off its list at the moment when the connection breaks ends only at its timeout
(`operations`). Its collective can be distinguished from a running one by its thread, which sleeps. A
collective of Gloo writes only received data to its tensors, so nothing more is written once all connections
are cut and every thread of Gloo in this process sleeps; a thread that wakes at its timeout ends its
collective with an error. A thread that waits for a processor does not count as sleeping. (Seen with PyTorch
2.15. PyTorch 2.7 does not name its threads, so there nothing is known.)
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Optional

_TASKS = "/proc/self/task"
# The names of the threads of PyTorch and Gloo. A thread that runs operations waits without a timeout; an
# event loop wakes every 10 ms.
_RUNNER = "pt_gloo_runloop"
_LOOP = "gloo_tcp_loop"
# How long the threads have to sleep, and the pause between two checks.
_STILL_SEC = 0.1
_LOOK_SEC = 0.02

# For each thread, the number of times that it fell asleep.
_Switches = dict[str, str]


class Quiescence:
    """Observes for how long the threads of Gloo in this process have slept."""

    def __init__(self) -> None:
        self._looked = 0.0
        self._since = 0.0
        self._switches: Optional[_Switches] = None

    def reached(self) -> bool:
        """Whether all threads have slept for `_STILL_SEC`, by this call and earlier ones. Cheap to call."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SEC:
            return False
        self._looked = now
        switches = _asleep()
        if switches is None or switches != self._switches:
            self._switches, self._since = switches, now
        return switches is not None and now - self._since >= _STILL_SEC


def _asleep() -> Optional[_Switches]:
    """A value that differs between two calls if a thread that runs operations was awake in between. None if a
    thread is awake, or if no thread is found: another version of PyTorch may use other names.
    """
    switches: _Switches = {}
    with contextlib.suppress(FileNotFoundError):  # no /proc
        for task in os.listdir(_TASKS):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                with open(f"{_TASKS}/{task}/status") as file:
                    status = {
                        name: value.strip() for name, _, value in (line.partition(":") for line in file)
                    }
                if status["Name"] in (_RUNNER, _LOOP) and not status["State"].startswith("S"):
                    return None
                if status["Name"] == _RUNNER:
                    switches[task] = status["voluntary_ctxt_switches"]
    return switches or None
