"""The training thread's device, and the stream of a heal beside it: the training thread continues to compute.

The device is the current device of the training thread when the step begins: a training loop may set it after
the Manager is made, and each thread has its own current device. No stream is made in a process that uses no
device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Optional

import torch
from torch.utils import _pytree

from torchft._manager.observe.own_time import ranged
from torchft.utils import DeviceEvent, current_device, free_stream, get_stream_context, poll, use_device


class Background:
    """The stream of a heal, behind what the training thread had queued when the step began."""

    def __init__(self) -> None:
        self._stream: Optional[torch.Stream] = None
        self._trainer: Optional[int] = None  # identity of the training thread
        self._device: Optional[torch.device] = None
        self._trains: Optional[torch.Stream] = None  # the training thread's
        self._before: Optional[DeviceEvent] = None  # what the training thread had queued when the step began
        self._used = False

    def begin(self) -> None:
        """Remembers the training thread, which calls this, its device, and what is queued there."""
        self._trainer = threading.get_ident()
        if current_device() is not None:
            self._trains = torch.accelerator.current_stream()
            self._device = self._trains.device
            self._before = DeviceEvent([self._device])

    def enter_thread(self) -> None:
        """Makes the training thread's device the current one of a thread that acts for it, for example on a
        new quorum or on a failure. Does nothing on the training thread itself.
        """
        if self._device is not None and threading.get_ident() != self._trainer:
            use_device(self._device.index)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the heal's stream current, behind all work that the training thread had queued when the step
        began. That work produced the state that is served, or may still read the memory that a heal
        overwrites.
        """
        if self._before is None or self._device is None:
            yield
            return
        if self._stream is None or self._stream.device != self._device or not self._used:
            self._stream = free_stream(self._device, self._trains)
        self._used = True
        with get_stream_context(self._stream):
            self._before.follow()
            yield

    def busy(self) -> bool:
        """Whether the device has not finished all work queued on this stream, for example sends to a peer."""
        return self._used and self._stream is not None and not self._stream.query()

    @ranged("should_commit::recovery_stream::synchronize")
    def join(self, timeout: timedelta, state: object = None) -> None:
        """Blocks the host until the device has finished the work queued on this stream, else TimeoutError.
        `state`: made on this stream; its memory is not reused before the current stream is done with it.
        """
        if not self._used or self._stream is None:
            return
        if not poll(self._stream.query, timeout.total_seconds()):
            raise TimeoutError(
                "timed out: the device did not end the transfer of a state within "
                f"{timeout.total_seconds()} s"
            )
        self._used = False
        for leaf in _pytree.tree_leaves(state):
            _share(leaf, self._stream.device)


def _share(leaf: Any, device: torch.device) -> None:
    """Tells the allocator that the current stream uses these tensors: it does not reuse them early."""
    if isinstance(leaf, torch.Tensor):
        tensor = getattr(leaf, "_local_tensor", leaf)  # the local shard of a DTensor
        if tensor.device == device:
            tensor.record_stream(torch.accelerator.current_stream(device))
