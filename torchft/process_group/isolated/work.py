"""What an operation of an isolated group gives back to its caller."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Optional

import torch
from torch.distributed import Work

from torchft.futures import _devices
from torchft.process_group._operations import copied

if TYPE_CHECKING:
    from torchft.process_group.isolated.parent import ProcessGroupBaby


class _BabyWork(Work):
    """An operation in the worker.

    Args:
        pg: the group it was called on, which knows it by
        op_id: its number.
        stream: the current one when it was called; None where there are only CPU tensors.
    """

    def __init__(self, pg: ProcessGroupBaby, op_id: int, stream: Optional[torch.Stream]) -> None:
        super().__init__()
        self._channel, self._op = pg._started(op_id)
        self._stream = stream

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Waits until it is done; see the package for what that means.

        Raises:
            RuntimeError: `timeout` has passed. The operation goes on.
            Exception: whatever it failed with.
        """
        op = self._op
        seconds, began = None, 0.0
        if timeout is not None and timeout > timedelta(0):
            seconds, began = timeout.total_seconds(), time.monotonic()
        if not op.done and not self._channel.wait(op, seconds):
            raise _timed_out(seconds)
        if op.error is not None:
            raise copied(op.error)
        if op.marks:
            if seconds is not None and not self._channel.reach(op, began + seconds):
                raise _timed_out(seconds)
            self._channel.devices.follow(op)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: Optional[timedelta] = None) -> None:
        self.wait(timeout)

    def get_future(self) -> torch.futures.Future[object]:
        stream = self._stream
        return self._channel.get_future(self._op, [] if stream is None else _devices(), stream)

    def is_completed(self) -> bool:
        return self._channel.is_done(self._op)

    def is_success(self) -> bool:
        return self.is_completed() and self._op.error is None

    def exception(self) -> Optional[Exception]:
        return self._op.error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        return self._op.result


def _timed_out(seconds: Optional[float]) -> Exception:
    return RuntimeError(f"Operation timed out: it did not complete within {seconds} s")
