"""What the threads of a worker cost besides their work.

Measured with two ranks on two cores: without this, half of the time of a small operation is spent waiting for a
processor on which one of Gloo's threads turns in circles.
"""

from __future__ import annotations

import contextlib
import os
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
