"""A process group that fails on request, for tests."""

from __future__ import annotations

from datetime import timedelta
from typing import List, Optional

import torch
from torch.distributed import Work
from torch.futures import Future

from torchft.process_group.base import ProcessGroup
from torchft.process_group.wrapper import ProcessGroupWrapper


class _FailingWork(Work):
    """Completes `work`, and then fails with `error`."""

    def __init__(self, work: Work, error: Exception) -> None:
        super().__init__()
        self._work = work
        self._error = error

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        self._work.wait() if timeout is None else self._work.wait(timeout)
        raise self._error

    def get_future(self) -> Future[object]:
        # Not `then`: it would turn the error into a RuntimeError.
        failed: Future[object] = Future()
        self._work.get_future().add_done_callback(lambda done: failed.set_exception(self._error))
        return failed


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Forwards everything to `pg`, except for the errors that a test requests."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._future_error: Optional[Exception] = None

    def _reset(self) -> None:
        super()._reset()
        self._future_error = None

    def report_future_error(self, e: Exception) -> None:
        """Makes the next allreduce fail with `e` asynchronously: the error is raised by its `wait`."""
        self._future_error = e

    def allreduce(self, tensors: List[torch.Tensor], opts: object) -> Work:
        work = super().allreduce(tensors, opts)
        error, self._future_error = self._future_error, None
        return work if error is None else _FailingWork(work, error)
