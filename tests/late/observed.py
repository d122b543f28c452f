"""Copies between the test device and the host, which a test can count, inspect and delay."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from tests.late import load
from torchft.checkpointing.memory.staging import StreamCopies
from torchft.utils import DeviceEvent, get_stream_context

_late = load()

BLOCK = 64 << 10


class Observed(StreamCopies):
    """The copies of a heal on their own stream, which delays each, or holds it until the gate is opened."""

    made: list[Observed]
    late: float | None = 0.002  # seconds; None: until the gate is opened
    # Called with each copy when it is queued.
    check: Callable[..., None] = staticmethod(lambda target, source: None)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        Observed.made.append(self)
        self.blocks = 0
        self.under_way = self.most_under_way = self.ended = self.nbytes = 0
        self.gate = threading.Semaphore(0)
        self._lock = threading.Lock()

    def block(self, nbytes: int) -> torch.Tensor:
        self.blocks += 1
        return super().block(nbytes).fill_(255)  # data that is read too early is wrong

    def start(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        self.check(target, source)
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        if target.device.type == "cpu":
            target.fill_(255)
        late = self.late
        nbytes = source.numel()
        _late.enqueue(self.gate.acquire if late is None else lambda: time.sleep(late), self._stream)
        super().start(target, source)
        _late.enqueue(lambda: self._end(nbytes), self._stream)
        with get_stream_context(self._stream):
            return DeviceEvent([self._device])

    def _end(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.under_way -= 1
            self.ended += 1

    def close(self) -> None:
        self.gate.release(1000)


def numbers(nbytes: int) -> torch.Tensor:
    """A tensor of numbers on the device."""
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8).to("late")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
