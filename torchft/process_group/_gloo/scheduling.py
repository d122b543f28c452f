"""Keeps Gloo's event loop thread from preempting the threads that send.

Measured with two ranks on two cores: without this, a small operation spends half of its time waiting for a
processor on which Gloo's event loop spins.
"""

from __future__ import annotations

import contextlib
import os
import time

# The name that Gloo gives to the thread that waits for its sockets.
_LOOP = "gloo_tcp_loop"
# How long to wait for the name of the thread, which takes a while on a busy machine. With a PyTorch that does
# not name its threads, each configuration of the group takes this much longer.
_NAMED_SEC = 0.1


def calm_loops() -> None:
    """Sets the event loop threads of Gloo to SCHED_BATCH.

    A sending thread holds the lock of its connection. The event loop only tries that lock. If the lock is
    taken, the event loop polls again at once, which returns the same event. An answer that arrives quickly
    wakes the event loop, which preempts the sender and then spins until its time slice of some 3 ms is used
    up. A thread of SCHED_BATCH does not preempt others when it wakes up.

    A thread sets its name when it first runs, so this waits for the name.
    """
    deadline = time.monotonic() + _NAMED_SEC
    while not _calm_loops() and time.monotonic() < deadline:
        time.sleep(0.001)


def _calm_loops() -> bool:
    """Returns whether there was such a thread."""
    found = False
    for thread in os.listdir("/proc/self/task"):
        # The thread may have ended, or a sandbox may forbid this.
        with contextlib.suppress(OSError):
            with open(f"/proc/self/task/{thread}/comm") as file:
                name = file.read().strip()
            if name == _LOOP:
                found = True
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
    return found
