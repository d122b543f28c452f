"""Destroys unused process groups on separate threads.

Destroying a Gloo group joins its threads, which stay in an operation until its timeout if a peer is silent. The thread
that creates the next group must not wait for that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from typing import Any

from torch.distributed import ProcessGroup

from torchft.utils import DeviceThread

# The garbage collector may call `reap` on any thread at any time, also on a thread that holds this lock.
_lock = threading.RLock()
_pending: set[threading.Thread] = set()

# How long the process waits at its end for groups that are being destroyed. With their connections
# shut that takes some 10 ms; a group that still waits for a silent peer is left to the kernel.
_EXIT_TIMEOUT_SEC = 1.0


def _reset_lock() -> None:
    global _lock
    _lock = threading.RLock()


# A thread of the parent may have held the lock. The other threads and what they destroy stay as they are.
os.register_at_fork(after_in_child=_reset_lock)


def reap(box: list[Any]) -> threading.Thread:
    """Drops the only element of `box`, on another thread.

    The caller must hold no other reference: the thread that drops the last one waits.

    Returns:
        The other thread, which ends when the element is dropped.
    """
    thread = DeviceThread(target=_destroy, args=(box,), name="torchft_reaper")
    with _lock:  # a thread in `_pending` has been started: `drain` joins it
        thread.start()
        _pending.add(thread)
    return thread


def _destroy(box: list[Any]) -> None:
    try:
        # PyTorch 2.7 keeps the GIL while it destroys a ProcessGroup, whose backend joins threads that may need the GIL.
        # PyTorch releases the GIL while it destroys a backend, so the backend is destroyed last.
        backends = _backends(box[0])
        box.clear()
        backends.clear()
    finally:
        with _lock:
            _pending.discard(threading.current_thread())


def _backends(pg: object) -> list[object]:
    if not isinstance(pg, ProcessGroup):
        return []
    with contextlib.suppress(RuntimeError):  # the group has no backend for one of its devices
        return [pg._get_backend(device) for device in pg._device_types]
    return []


def drain(timeout_sec: float) -> bool:
    """Waits until everything is destroyed. Returns False if that takes longer than `timeout_sec`."""
    deadline = time.monotonic() + timeout_sec
    with _lock:
        threads = list(_pending)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _end() -> None:
    drain(_EXIT_TIMEOUT_SEC)
    # Not imported above: its package imports this module. It may have failed to load.
    if native := sys.modules.get("torchft.process_group.isolated._native"):
        native.stop_threads_that_come_back()


atexit.register(_end)
