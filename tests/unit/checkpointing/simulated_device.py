"""A simulated device: CPU memory that is copied late, in order, on a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Callable

import torch

BLOCK = 64 << 10


class Simulated:
    """Holds its copies back until they are let through, or lets them through after a while."""

    made: list[Simulated]
    late = 0.002  # seconds; None: until the gate is opened
    check: Callable[..., None] = staticmethod(lambda target, source: None)  # looks at each copy

    def __init__(self, device: torch.device) -> None:
        Simulated.made.append(self)
        self.blocks = 0
        self.under_way = self.most_under_way = self.ended = self.nbytes = 0
        self.gate = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def block(self, nbytes: int) -> torch.Tensor:
        self.blocks += 1
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        with self._lock:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        target.fill_(255)  # what is read too early is wrong
        done = threading.Event()
        self._queue.put((target, source, done))
        return lambda: wait_for(done)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            target, source, done = item
            if self.late is None:
                self.gate.acquire()
            else:
                time.sleep(self.late)
            self.check(target, source)
            target.copy_(source)
            with self._lock:
                self.nbytes += source.numel()
                self.under_way -= 1
                self.ended += 1
            done.set()

    def close(self) -> None:
        self.gate.release(1000)
        self._queue.put(None)
        self._thread.join(10)


def wait_for(done: threading.Event) -> None:
    assert done.wait(60)


def numbers(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
