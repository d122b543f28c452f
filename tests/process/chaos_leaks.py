"""Compares a trainer's resources with those after its first reconfiguration, to detect leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable


def threads() -> Counter[str]:
    """Counts the threads of this process by the beginnings of their names."""
    return Counter(thread.name.split("-")[0] for thread in threading.enumerate())


def left_over() -> Counter[str]:
    """Counts the threads of this process, and its open descriptors by kind."""
    found = threads()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing itself
            found[os.readlink(f"/proc/self/fd/{descriptor}").split(":[")[0]] += 1
    return found


class Leaks:
    """Compares quorums with the same number of groups, because each peer takes descriptors.

    The reference is the value at the end of the first such quorum after a reconfiguration. In the first
    quorum of all, the process may not have allocated all of its permanent resources.

    Attributes:
        compared: number of comparisons; 0 in a process that ends during its reference quorum.
    """

    def __init__(self, count: Callable[[], Counter[str]] = left_over) -> None:
        self.compared = 0
        self._count = count
        self._first: int | None = None
        self._last = (0, 0)  # quorum id, number of groups
        self._settled: dict[int, tuple[int, Counter[str]]] = {}  # references, by number of groups

    def step(self, quorum: int, groups: int) -> None:
        """Call it after each committed step. Another group may have ended in its quorum."""
        if self._first is None:
            self._first = quorum
        self._last = quorum, groups
        if quorum != self._first and self._settled.get(groups, (quorum,))[0] == quorum:
            self._settled[groups] = quorum, self._count()

    def grown(self, wait_s: float) -> dict[str, int]:
        """Returns the resources that have grown. Waits up to this many seconds for resources that are about
        to be freed.
        """
        quorum, groups = self._last
        before, settled = self._settled.get(groups, (quorum, Counter()))
        if before == quorum:
            return {}
        self.compared += 1
        gc.collect()  # an exception keeps its frames alive, and with them the objects that they used
        deadline = time.monotonic() + wait_s
        while (more := self._count() - settled) and time.monotonic() < deadline:
            time.sleep(0.05)
        return dict(more)
