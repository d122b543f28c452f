"""Decides when a replica group that has ended is restarted."""

from __future__ import annotations

import re

# Consecutive incarnations without a step, after which a group is not restarted: its script cannot start, or
# not on this host, and its log has the reason. The first may have met a port, a device or memory that the
# incarnation before it still held, the second one that was released late: the delays are long enough for
# both. The third has no such excuse.
FRUITLESS_LIVES = 3
_DELAYS_SEC = [1.0, 5.0]
_DEVICE = re.compile(r"CUDA|NVIDIA|NVML|NCCL|\bHIP\b")


def of_device(error: str) -> bool:
    """Whether the last line of a traceback is the error of a device: on another host it may not occur."""
    return _DEVICE.search(error) is not None


def restart_delay(fruitless: int) -> float | None:
    """Returns the seconds until a group that ended with an error is restarted; None: it is not restarted.

    ``fruitless`` is the number of consecutive incarnations, including the last, that participated in no step.
    """
    if fruitless == 0:
        return 0.0  # the group was a healthy member, and the others wait for it
    if fruitless >= FRUITLESS_LIVES:
        return None
    return _DELAYS_SEC[fruitless - 1]
