"""What the threads of a worker cost besides their work.

Measured with two ranks on two cores: without the first, half of the time of a small operation is spent waiting for a
processor on which one of Gloo's threads turns in circles.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time

# The name that Gloo gives to the thread that waits for its sockets.
_LOOP = "gloo_tcp_loop"
# On a busy machine it takes a while. A PyTorch that names no threads costs as much for each set of peers.
_NAMED_SEC = 0.1


def calm_loops() -> None:
    """Keeps Gloo's thread that waits for sockets from interrupting the others.

    A thread that sends holds its connection's lock. The loop only tries that lock, and when it is taken asks for events
    again at once, where it finds the same. Woken by an answer that comes quickly it takes the processor away from the
    sender, and then turns until its share is used up: some 3 ms. A thread of SCHED_BATCH is woken without that.

    A thread gives itself its name when it first runs, which is waited for.
    """
    deadline = time.monotonic() + _NAMED_SEC
    while not _calm_loops() and time.monotonic() < deadline:
        time.sleep(0.001)


def _calm_loops() -> bool:
    """Whether there was one."""
    found = False
    for thread in os.listdir("/proc/self/task"):
        # It may have ended, and a sandbox may forbid it.
        with contextlib.suppress(OSError):
            with open(f"/proc/self/task/{thread}/comm") as file:
                name = file.read().strip()
            if name == _LOOP:
                found = True
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
    return found


class Guests:
    """Threads of a C++ library that call Python from time to time.

    Python makes its state of such a thread for every call, with a piece of fresh memory from the system, and
    gives all up at the end of the call. Counted once more, the state stays until the process ends.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()

    def keep(self) -> None:
        """To be called by such a thread."""
        ident = threading.get_ident()
        if ident not in self._known:
            self._known.add(ident)
            ctypes.pythonapi.PyGILState_Ensure()
