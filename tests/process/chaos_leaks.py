"""What a leak would make grow in a trainer, compared with what there was after its first reconfiguration."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter


def left_over() -> Counter[str]:
    """The threads of this process by the beginnings of their names, and its open descriptors by what they are."""
    found = Counter(thread.name.split("-")[0] for thread in threading.enumerate())
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            found[os.readlink(f"/proc/self/fd/{descriptor}").split(":[")[0]] += 1
    return found


class Leaks:
    """Compares quorums of the same number of groups: each peer takes descriptors.

    The value to compare with is that of the end of the first such quorum that the process was reconfigured for. In the
    very first quorum of its life it may not have met yet what it keeps for good.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._settled: dict[int, tuple[int, Counter[str]]] = {}  # by the number of groups: a quorum, and its value

    def step(self, quorum: int, groups: int) -> None:
        """To be called after each committed step: another one may have ended what it ran on."""
        if self._first is None:
            self._first = quorum
        if quorum != self._first and self._settled.get(groups, (quorum,))[0] == quorum:
            self._settled[groups] = quorum, left_over()

    def grown(self, groups: int, wait_s: float) -> dict[str, int]:
        """What there is more of than there was; what is about to end has so many seconds for it."""
        if groups not in self._settled:
            return {}
        _, settled = self._settled[groups]
        gc.collect()  # an error that was raised holds its frames, and they what they used
        deadline = time.monotonic() + wait_s
        while (more := left_over() - settled) and time.monotonic() < deadline:
            time.sleep(0.05)
        return dict(more)
