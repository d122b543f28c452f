"""Values in host memory by which a stream of the trainer follows the worker's device.

A mark of the worker names a slot of a page and a value. The worker's stream writes the value into the slot
when it has done the work before the mark, and the trainer's stream waits for it. The page belongs to the
trainer. When the worker has ended, the trainer writes the values that its streams still wait for, so they
need nothing of a killed process.

The values of a slot only increase, in cyclic order. The next worker that gets the page continues from the
values that it finds there: a stream may come to a wait for an earlier worker only then, and must not stop at
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from typing import Any, Callable, Optional

from torchft.process_group.isolated.driver import CudaDriver

_SLOTS = 1024  # more than a process has streams
_SIZE = 4 * _SLOTS
_PROBE = _SLOTS - 1  # a slot for the question whether the driver can do this
_CYCLE = 1 << 32


def reached(now: int, value: int) -> bool:
    """Whether a slot with `now` has reached `value`, in cyclic order, as the driver compares them."""
    return (now - value) % _CYCLE < _CYCLE // 2


class Page:
    """Memory slots of two processes and their devices, never unmapped. RuntimeError: the driver refuses.

    Args:
        stream: one on which the driver is asked.
        descriptor: the memory's file.
    """

    def __init__(self, driver: CudaDriver, stream: Any, descriptor: int) -> None:
        self.descriptor = descriptor
        self._driver = driver
        self._slots = (ctypes.c_uint32 * _SLOTS).from_buffer(mmap.mmap(descriptor, _SIZE))
        _kept.append(self._slots)  # before it is registered: a device may use it until the process ends
        self._at = driver.register(ctypes.addressof(self._slots), _SIZE)
        # Only the calls themselves tell whether the driver has them.
        self.write(stream, _PROBE, 0)
        self.wait(stream, _PROBE, 0)

    def __getitem__(self, slot: int) -> int:
        return self._slots[slot]

    def __setitem__(self, slot: int, value: int) -> None:
        self._slots[slot] = value

    def write(self, stream: Any, slot: int, value: int) -> None:
        self._driver.write(stream, self._at + 4 * slot, value)

    def wait(self, stream: Any, slot: int, value: int) -> None:
        self._driver.wait(stream, self._at + 4 * slot, value)


_kept: list[Any] = []


class Awaited:
    """The trainer's end of a page, for one worker."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._last: dict[int, int] = {}  # by slot: the last value that a stream may wait for
        # Reentrant: the garbage collector may end a group on a thread that holds it.
        self._lock = threading.RLock()
        self._released = False

    def reached(self, slot: int, value: int) -> bool:
        return reached(self.page[slot], value)

    def follow(self, stream: Any, slot: int, value: int) -> None:
        """Makes the stream wait for a value, until `release` at the latest."""
        if self.reached(slot, value):
            return
        with self._lock:
            if self._released:
                return
            last = self._last.get(slot, value)
            self._last[slot] = value if reached(value, last) else last
        # Without the lock: the driver blocks while the stream's queue is full, and `release` makes room. A
        # wait that is queued after `release` finds its value.
        self.page.wait(stream, slot, value)

    def release(self) -> None:
        """Lets streams continue that wait for the worker, which has ended."""
        with self._lock:
            self._released = True
            for slot, value in self._last.items():
                if not self.reached(slot, value):
                    self.page[slot] = value


class WrittenValues:
    """The worker's end of a page."""

    def __init__(self, page: Page) -> None:
        self._page = page
        # A slot for each stream: the values of two streams would come in any order.
        self._slots: dict[Any, int] = {}
        self._values: dict[int, int] = {}
        self._lock = threading.Lock()

    def mark(self, stream: Any) -> tuple[int, int]:
        """A slot, and the value that it has when the stream has done the work queued so far."""
        with self._lock:
            slot = self._slots.setdefault(stream, len(self._slots))
            value = self._values[slot] = (self._values.get(slot, self._page[slot]) + 1) % _CYCLE
            self._page.write(stream, slot, value)
        return slot, value


# The trainer's pages


class Pages:
    """The pages of a process for one device. A worker has one for itself until it has ended. `driver`: makes
    the device's driver; None, or a RuntimeError, if it has no such calls.
    """

    def __init__(self, driver: Callable[[], Optional[CudaDriver]]) -> None:
        self._make = driver
        self._driver: Optional[CudaDriver] = None
        self._refused = False
        self._free: list[Page] = []
        self._lock = threading.RLock()

    def take(self, stream: Any) -> Optional[Page]:
        """A page for a worker; None if the driver (asked on `stream`) or the system refuses."""
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._refused:
                return None
            with contextlib.ExitStack() as unless_taken, contextlib.suppress(RuntimeError, OSError):
                descriptor = os.memfd_create("torchft-values", os.MFD_CLOEXEC)
                unless_taken.callback(os.close, descriptor)
                os.ftruncate(descriptor, _SIZE)
                self._driver = self._driver or self._make()
                if self._driver is not None:
                    page = Page(self._driver, stream, descriptor)
                    unless_taken.pop_all()
                    return page
            self._refused = True
            return None

    def give_back(self, page: Page) -> None:
        """Keeps a page whose worker has ended, for the next one."""
        self._free.append(page)
