"""Device work on the tensors of the training thread by other threads, which take turns with it by a lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

import torch

from torchft.utils import DeviceEvent, free_stream, get_stream_context, on_device


class SideStream:
    """A stream of its own for the work of other threads. For tensors in host memory it does nothing.

    The training thread may have queued its forward and backward pass already. On its stream, a copy would
    wait for all of these kernels. So the copy runs on a separate stream, behind the last :meth:`mark`. It may
    run while kernels of the pass read the same tensors.

    Both threads hold a lock: the training thread from the work to :meth:`mark`, others for all of
    :meth:`running`. So the work of :meth:`running` follows that before the mark by the event, and precedes
    later work of the training thread because it has ended when the lock is released.

    Args:
        device: the device of the tensors. The work that is queued on its current stream so far is marked.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mark: Optional[DeviceEvent] = None
        self.mark()

    def mark(self) -> None:
        """Marks the work on the current stream, behind which the work of other threads has to run."""
        if self._device.type != "cpu":
            self._trains = torch.accelerator.current_stream(self._device)
            self._mark = DeviceEvent([self._device])

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Registers a tensor that was allocated within :meth:`running` for use by the training thread.
        Otherwise the allocator would reuse its memory after a free in the order of the other stream only.
        """
        if self._device.type != "cpu":
            tensor.record_stream(self._trains)
        return tensor

    @contextmanager
    def running(self) -> Iterator[None]:
        """For work of a thread that does not train. At the end of the block the device has done it."""
        if self._mark is None:
            yield
            return
        with on_device(self._device):
            stream = free_stream(self._device, self._trains)
            with get_stream_context(stream):
                self._mark.follow()
                try:
                    yield
                finally:
                    stream.record_event().synchronize()  # others may use the stream meanwhile
