"""What a leak would make grow in a trainer, compared with what there was after its first reconfiguration."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable


def threads() -> Counter[str]:
    """The threads of this process by the beginnings of their names."""
    return Counter(thread.name.split("-")[0] for thread in threading.enumerate())


def left_over() -> Counter[str]:
    """The threads of this process, and its open descriptors by what they are."""
    found = threads()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found[os.readlink(f"/proc/self/fd/{descriptor}").split(":[")[0]] += 1
    return found


class Leaks:
    """Compares quorums of the same number of groups: each peer takes descriptors.

    The value to compare with is that of the end of the first such quorum that the process was reconfigured for. In the
    very first quorum of its life it may not have met yet what it keeps for good.

    Attributes:
        compared: how many comparisons were made: none in a process that ends in the quorum that it would compare with.
    """

    def __init__(self, count: Callable[[], Counter[str]] = left_over) -> None:
        self.compared = 0
        self._count = count
        self._first: int | None = None
        self._last = (0, 0)  # quorum, groups
        self._settled: dict[int, tuple[int, Counter[str]]] = {}  # by the number of groups: a quorum, and its value

    def step(self, quorum: int, groups: int) -> None:
        """To be called after each committed step: another one may have ended what it ran on."""
        if self._first is None:
            self._first = quorum
        self._last = quorum, groups
        if quorum != self._first and self._settled.get(groups, (quorum,))[0] == quorum:
            self._settled[groups] = quorum, self._count()

    def grown(self, wait_s: float) -> dict[str, int]:
        """What there is more of than there was; what is about to end has so many seconds for it."""
        quorum, groups = self._last
        before, settled = self._settled.get(groups, (quorum, Counter()))
        if before == quorum:
            return {}
        self.compared += 1
        gc.collect()  # an error that was raised holds its frames, and they what they used
        deadline = time.monotonic() + wait_s
        while (more := self._count() - settled) and time.monotonic() < deadline:
            time.sleep(0.05)
        return dict(more)
