"""What tests on a device have in common."""

from __future__ import annotations

import time
from typing import Callable

import torch
import torch.distributed as dist

from tests.promises import ABORT_S, HELD_UP_S, within

DEVICE = torch.device("cuda", 0)

MB = 1 << 20

# What a host takes at most that does not wait for its device: a thread can be held up.
HOST_S = HELD_UP_S
# How long a stream is busy for a test that tells such a host from one that waits: longer than any bound of those tests.
BUSY_S = within(ABORT_S) + HELD_UP_S


def busy(seconds: float) -> None:
    """Keeps the current stream busy for about that long, or somewhat longer."""
    clock_hz = 2_000_000_000  # no device of today is faster
    torch.cuda._sleep(int(seconds * clock_hz))


def used_mb() -> float:
    """Device memory in use by all processes. Right only when nobody else uses the device."""
    free, total = torch.cuda.mem_get_info(DEVICE)
    return (total - free) / MB


def settled_mb() -> float:
    """`used_mb`, without what this process has freed, after a process that has just ended was removed from it."""
    torch.cuda.synchronize()
    last, same = used_mb(), 0
    deadline = time.monotonic() + 10
    while same < 5 and time.monotonic() < deadline:
        # Each time: shared memory goes back on a thread of its own.
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


def needs_implementation(name: str) -> None:
    """Skips where this PyTorch does not have that implementation of NCCL."""
    if name == "nccl2" and not hasattr(dist, "ProcessGroupNCCL2"):
        import pytest  # not in the processes that a test starts

        pytest.skip("needs PyTorch >= 2.15, which has ProcessGroupNCCL2")
