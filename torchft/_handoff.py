"""Runs functions on threads of their own, also for the garbage collector.

The collector calls destructors on any thread, in the middle of anything: while that thread holds a lock, or
while another thread, which holds one, waits for it to start. So a destructor must not take a lock, and not
start a thread, which takes a lock of ``threading``. It hands a function off: `put` of a SimpleQueue may
interrupt itself. A thread that waits for the queue starts one for each function, because they may take long.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Optional

from torchft.utils import current_device, use_device

_logger = logging.getLogger(__name__)


class Handed:
    """A function that was handed off. It runs with the device of the thread that did so.

    Args:
        function: is dropped on its own thread, after it was called.
        name: of its thread.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self.name = name
        self._function: Optional[Callable[[], object]] = function
        self._device = current_device()
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """Whether the function has returned."""
        return self._over.is_set()

    def wait(self, timeout_sec: float) -> bool:
        """Waits for the end of the function. Returns whether it has returned."""
        return self._over.wait(timeout_sec)

    def run(self) -> None:
        function, self._function = self._function, None
        try:
            use_device(self._device)
            if function is not None:
                function()
        except Exception:
            _logger.exception("%s: failed", self.name)
        finally:
            del function
            _pending.discard(self)
            self._over.set()


_queue: SimpleQueue[Handed] = SimpleQueue()
_pending: set[Handed] = set()
_starter: Optional[threading.Thread] = None
_starter_lock = threading.Lock()


def prepare() -> None:
    """Makes :func:`hand_off` possible; for constructors of objects whose destructors hand off."""
    global _starter
    with _starter_lock:
        if _starter is None:
            _starter = threading.Thread(
                target=_start_each, args=(_queue,), name="torchft_hand_off", daemon=True
            )
            _starter.start()


def hand_off(function: Callable[[], object], name: str) -> Handed:
    """Calls a function on another thread, once :func:`prepare` was called. Its errors are logged.

    The garbage collector may call this, on any thread at any time.
    """
    handed = Handed(function, name)
    _pending.add(handed)
    _queue.put(handed)
    return handed


def _start_each(queue: SimpleQueue[Handed]) -> None:
    while True:
        handed = queue.get()
        try:
            threading.Thread(target=handed.run, name=handed.name, daemon=True).start()
        except RuntimeError:  # the process has as many threads as it may have, or it ends
            handed.run()
        del handed


def drain(timeout_sec: float) -> bool:
    """Waits for the end of all functions. Returns False if that takes longer than `timeout_sec`."""
    deadline = time.monotonic() + timeout_sec
    return all(handed.wait(max(0.0, deadline - time.monotonic())) for handed in list(_pending))


def _forget() -> None:
    """In a forked child, which must never destroy what the parent has handed off: it has no such threads."""
    global _queue, _pending, _starter, _starter_lock
    parents = (_queue, _pending)
    # More than a reference, which the end of Python drops.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(parents))
    _queue, _pending, _starter, _starter_lock = SimpleQueue(), set(), None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
