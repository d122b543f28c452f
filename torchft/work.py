"""A ``Work`` that is complete from the start, for no communication, and one that a thread ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Optional, Union, cast

import torch
import torch.distributed as dist

__all__: list[str] = []

# A reduction as users write it, `ReduceOp.SUM`, is of the enum; one with a factor is a `ReduceOp`.
AnyReduceOp = Union[dist.ReduceOp, dist.ReduceOp.RedOpType]


class _DummyWork(dist._Work):
    """A finished operation: its future already holds `result`."""

    def __init__(self, result: object) -> None:
        super().__init__()
        self.result_ = result
        self.future_: torch.futures.Future[object] = torch.futures.Future()
        self.future_.set_result(result)

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[object]:
        return self.future_

    # The methods of dist._Work from C++ describe an operation that has not begun: all are overridden.

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return cast(list[torch.Tensor], self.result_)

    def synchronize(self) -> None:
        pass

    def block_current_stream(self, timeout: Optional[timedelta] = None) -> None:
        pass


class _OrderedByWait(dist._Work):
    """A work whose ``wait`` makes the current stream wait for its result."""

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: Optional[timedelta] = None) -> None:
        self.wait() if timeout is None else self.wait(timeout)


class _PendingWork(_OrderedByWait):
    """An operation that some thread ends. A subclass has `wait`.

    Args:
        value: value of the future.
        devices: devices of the value, without the CPU.
    """

    def __init__(self, value: object, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._value = value
        self._devices = devices
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: Optional[Exception] = None
        self._future: Optional[torch.futures.Future[object]] = None

    def end(self, error: Optional[Exception]) -> None:
        """Sets the outcome; only the first call counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self._error = error
            self._ended.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def _complete(self, future: torch.futures.Future[object]) -> None:
        if self._error is not None:
            # pyrefly: ignore [bad-argument-type]  # typed as a result
            future.set_exception(self._error)
        else:
            future.set_result(self._value)

    def get_future(self) -> torch.futures.Future[object]:
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = future = torch.futures.Future(devices=[*self._devices])
            ended = self._ended.is_set()
        if ended:
            self._complete(future)
        return future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Optional[Exception]:  # type: ignore[override]
        return self._error

    def result(self) -> list[torch.Tensor]:
        return cast(list[torch.Tensor], self._value)
