"""A link between two network namespaces, with the delay and loss of a link between cities.

A replacement of `tc netem` for kernels without it: frames pass through this process, from one TAP device to
another.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Mapping

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_LONGEST_FRAME = 1 << 16


def tap(name: str) -> int:
    """Makes a network device of that name. Returns a descriptor to read and write its frames; closing it
    removes the device.

    Raises:
        OSError: not root, or a kernel without TAP.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class LongLinks:
    """Carries frames between devices, delays each, and drops some.

    Args:
        ends: for each descriptor of a device, the descriptor to which its frames are sent.
        delay_s: delay of each frame in seconds, in each direction.
        loss: the share of frames that are dropped.
    """

    def __init__(self, ends: Mapping[int, int], delay_s: float, loss: float) -> None:
        self.carried, self.lost = 0, 0
        self._ends = dict(ends)
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(7)
        self._on_the_way: list[tuple[float, int, int, bytes]] = []  # due time, number, destination, frame
        self._numbers = itertools.count()
        self._wake, self._closing = os.pipe()
        self._thread = threading.Thread(target=self._run, name="long_links", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._closing)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            wait = max(0.0, self._on_the_way[0][0] - time.monotonic()) if self._on_the_way else None
            ready, _, _ = select.select([*self._ends, self._wake], [], [], wait)
            if self._wake in ready:
                return
            for descriptor in ready:
                self._take(descriptor)
            while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(self._on_the_way)
                with contextlib.suppress(OSError):  # the device is down, or its queue is full
                    os.write(to, frame)

    def _take(self, descriptor: int) -> None:
        try:
            frame = os.read(descriptor, _LONGEST_FRAME)
        except OSError:  # the device is down
            return
        if self._random.random() < self._loss:
            self.lost += 1
            return
        self.carried += 1
        due = time.monotonic() + self._delay_s
        heapq.heappush(self._on_the_way, (due, next(self._numbers), self._ends[descriptor], frame))
