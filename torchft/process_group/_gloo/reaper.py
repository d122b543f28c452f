"""Destroys unused process groups on separate threads.

Destroying a Gloo group joins its threads, which stay in an operation until its timeout if a peer is silent.
The thread that creates the next group must not wait for that.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from torchft._handoff import Handed, drain, hand_off

# How long the process waits at its end for groups that are being destroyed. With their connections
# shut that takes some 10 ms; a group that still waits for a silent peer is left to the kernel.
_EXIT_TIMEOUT_SEC = 1.0


def reap(box: list[Any]) -> Handed:
    """Drops the only element of `box`, on another thread.

    The caller must hold no other reference: the thread that drops the last one waits.
    """
    return hand_off(partial(_destroy, box), "torchft_reaper")


def _destroy(box: list[Any]) -> None:
    # PyTorch 2.7 keeps the GIL while it destroys a ProcessGroup, whose backend joins threads that may need
    # the GIL. PyTorch releases the GIL while it destroys a backend, so the backend is destroyed last.
    backends = _backends(box[0])
    box.clear()
    backends.clear()


def _backends(pg: object) -> list[object]:
    if not isinstance(pg, ProcessGroup):
        return []
    with contextlib.suppress(RuntimeError):  # the group has no backend for one of its devices
        return [pg._get_backend(device) for device in pg._device_types]
    return []


def _end() -> None:
    drain(_EXIT_TIMEOUT_SEC)
    # Not imported above: its package imports this module. It may have failed to load.
    if native := sys.modules.get("torchft.process_group.isolated._native"):
        native.stop_threads_that_come_back()


atexit.register(_end)
