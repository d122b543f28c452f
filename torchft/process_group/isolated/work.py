"""The ``Work`` that an operation of an isolated group returns."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Optional

import torch

from torchft.process_group._errors import copied
from torchft.process_group.isolated.operation import timed_out
from torchft.utils import devices_of
from torchft.work import _OrderedByWait

if TYPE_CHECKING:
    from torchft.process_group.isolated.parent import ProcessGroupBaby


class _BabyWork(_OrderedByWait):
    """An operation `op_id` in `pg`'s worker. `stream`: the current one then; None: CPU tensors only."""

    def __init__(self, pg: ProcessGroupBaby, op_id: int, stream: Optional[torch.Stream]) -> None:
        super().__init__()
        self._channel, self._op = pg._started(op_id)
        self._stream = stream

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Waits until the operation is done, as the package's docstring defines it.

        Raises:
            RuntimeError: `timeout` has passed; the operation continues. If only a stream waits, the timeout
                begins with this call, and the worker is ended when it has passed: `errored` of the group says
                so.
            Exception: the error of the operation.
        """
        op = self._op
        seconds, began = None, 0.0
        if timeout is not None and timeout > timedelta(0):
            seconds, began = timeout.total_seconds(), time.monotonic()
        if not op.wait(seconds):
            raise timed_out(seconds)
        if op.error is not None:
            raise copied(op.error)
        if op.mark is not None:
            self._channel.follow(op, seconds, began)
        return True

    def get_future(self) -> torch.futures.Future[object]:
        return self._channel.get_future(self._op, [*devices_of(self._op.result)], self._stream)

    def is_completed(self) -> bool:
        return self._channel.is_over(self._op)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Optional[Exception]:
        if not self.is_completed():
            return None
        # An operation that was only queued when the worker ended has not succeeded.
        return self._op.error or (self._channel.broken if self._op.mark is not None else None)

    def result(self) -> list[torch.Tensor]:
        return self._op.result
