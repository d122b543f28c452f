"""Helpers for tests on a device."""

from __future__ import annotations

import time
from typing import Callable

import torch

from tests.promises import ABORT_S, HELD_UP_S, within

DEVICE = torch.device("cuda", 0)

MB = 1 << 20

# How long a stream is busy in tests that show that a call does not wait: longer than any bound of these
# tests.
BUSY_S = within(ABORT_S) + HELD_UP_S


def busy(seconds: float) -> None:
    """Keeps the current stream busy for this long or somewhat longer."""
    # Above the clock rate of data center GPUs (H100: 1.98 GHz). With a faster clock the stream is busy for
    # less time.
    clock_hz = 2_000_000_000
    torch.cuda._sleep(int(seconds * clock_hz))


def used_mb() -> float:
    """Device memory used by all processes. Meaningful only if no other program uses the device."""
    free, total = torch.cuda.mem_get_info(DEVICE)
    return (total - free) / MB


def settled_mb() -> float:
    """Returns `used_mb` after this process has returned its cached memory, and the driver that of ended
    processes.
    """
    torch.cuda.synchronize()
    last, same = used_mb(), 0
    deadline = time.monotonic() + 10
    while same < 5 and time.monotonic() < deadline:
        # Repeated, because a separate thread returns shared memory.
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        time.sleep(0.05)
        now = used_mb()
        same = same + 1 if now == last else 0
        last = now
    return last


def wait_until(what: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.001)
