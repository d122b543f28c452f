"""Moves memory between devices and the host, through page-locked blocks of host memory: one is filled while
the other is emptied. PyTorch's allocator keeps freed blocks, and reuses one only after the copies from it.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, List, Optional, Tuple, Type

import torch

from torchft.utils import DeviceEvent, free_stream

BLOCK = 32 << 20  # bytes; holds several of the blocks that are sent over the network


def page_locked(nbytes: int) -> torch.Tensor:
    """Allocates host memory that devices read and write directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class StreamCopies:
    """Copies from and to one device on a separate stream, in the order in which they are queued, and behind
    the work that was queued on the device before. For CUDA and backends with the same interface.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: List[torch.Tensor] = []  # of `in_blocks`
        self._backend: Any = torch.get_device_module(device.type)
        self._stream = free_stream(device)
        self._stream.wait_event(torch.accelerator.current_stream(device).record_event())

    def block(self, nbytes: int) -> torch.Tensor:
        return page_locked(nbytes)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        """Queues a copy between device and block. Returns an event behind it."""
        with self._backend.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return DeviceEvent([self._device])

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of a flat tensor of bytes on the device."""
        block = self.block(source.numel())
        self.start(block, source).wait(math.inf)
        return block

    def in_blocks(self, source: torch.Tensor) -> Generator[torch.Tensor, None, None]:
        """Yields the bytes of device memory in blocks on the host, each valid until the next. No copy is in
        progress after the last one, or when the iterator is closed. One iterator at a time.
        """
        self._blocks = self._blocks or [self.block(BLOCK) for _ in range(2)]
        ahead: List[Tuple[torch.Tensor, DeviceEvent]] = []
        try:
            for number, piece in enumerate(source.split(BLOCK)):
                block = self._blocks[number % 2][: piece.numel()]
                ahead.append((block, self.start(block, piece)))
                if number:
                    yield _first(ahead)
            yield _first(ahead)
        finally:
            for _, event in ahead:
                event.wait(math.inf)


def _first(ahead: List[Tuple[torch.Tensor, DeviceEvent]]) -> torch.Tensor:
    block, event = ahead[0]
    event.wait(math.inf)
    del ahead[0]
    return block


def copies_for(kind: str) -> Optional[Type[StreamCopies]]:
    """Returns the class of copies for a device type, such as "cuda"; None for a type that is not tested."""
    # an accelerator that registers itself has CUDA's interface
    registered = kind == torch._C._get_privateuse1_backend_name() and hasattr(
        getattr(torch, kind, None), "Stream"
    )
    return StreamCopies if registered or kind in ("cuda", "xpu") else None


class Uploads:
    """Copies host memory to devices, without a wait for each copy: while the devices empty one page-locked
    block, the host fills the other. A copy from other host memory waits on the host.

    The copies are queued on the current streams: they follow the work that was queued there, and precede
    later work.

    Args:
        timeout: seconds within which the devices must have emptied a block
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._blocks: List[torch.Tensor] = []
        # Of each block the devices that it is copied to, and the event behind these copies.
        self._devices: List[set[torch.device]] = [set(), set()]
        self._events = [DeviceEvent(()), DeviceEvent(())]
        self._turn = self._used = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a tensor to one of its shape and dtype, on any device. The source may be changed when this
        returns. TimeoutError: the devices have not emptied a block in time.
        """
        if copies_for(target.device.type) is None or not target.is_contiguous() or not source.is_cpu:
            target.copy_(source)
            return
        self._blocks = self._blocks or [page_locked(BLOCK) for _ in range(2)]
        into, data = (t.reshape(-1).view(torch.uint8) for t in (target, source))
        start = 0
        while start < data.numel():
            if self._used == BLOCK:
                self._next_block()
            end = min(data.numel(), start + BLOCK - self._used)
            block = self._blocks[self._turn][self._used : self._used + end - start]
            block.copy_(data[start:end])
            into[start:end].copy_(block, non_blocking=True)
            self._devices[self._turn].add(target.device)
            # the next tensor begins at a multiple of 64 bytes, since copies between other addresses are slow
            self._used, start = min(BLOCK, -(-(self._used + end - start) // 64) * 64), end

    def finish(self) -> None:
        """Waits until the devices have all data. TimeoutError: they do not take it."""
        self._next_block()
        self._next_block()

    def _next_block(self) -> None:
        self._events[self._turn] = DeviceEvent(self._devices[self._turn])
        self._turn, self._used = 1 - self._turn, 0
        devices = self._devices[self._turn]
        if not self._events[self._turn].wait(self._timeout):
            names = ", ".join(sorted(str(device) for device in devices))
            raise TimeoutError(
                f"timed out: {names} did not take a part of a state within {self._timeout:g} s"
            )
        devices.clear()
