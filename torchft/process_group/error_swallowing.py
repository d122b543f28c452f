"""A process group whose allreduce never fails: after an error it does nothing until reconfigured."""

from __future__ import annotations

from datetime import timedelta
from typing import List, Optional

import torch
from torch.distributed import Work
from torch.futures import Future

from torchft.process_group.base import ProcessGroup
from torchft.process_group.wrapper import ProcessGroupWrapper
from torchft.work import _DummyWork


class _ErrorSwallowingWork(Work):
    """Always succeeds; an error of `work` is reported to `pg`, and the future then has `default_result`."""

    def __init__(
        self,
        pg: ErrorSwallowingProcessGroupWrapper,
        work: Work,
        default_result: object,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._work = work
        self._default_result = default_result

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        try:
            # PyTorch does not accept None here.
            self._work.wait() if timeout is None else self._work.wait(timeout)
        except Exception as e:
            self._pg.report_error(e)
        return True

    def get_future(self) -> Future[object]:
        def swallow(fut: Future[object]) -> object:
            try:
                return fut.value()
            except Exception as e:
                self._pg.report_error(e)
                return self._default_result

        return self._work.get_future().then(swallow)


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Swallows the errors of `pg`'s allreduce.

    After the first error an allreduce does nothing and succeeds, with its tensors unchanged, until
    `configure` or `reconfigure`. `error` returns the last error.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._error: Optional[Exception] = None

    def _reset(self) -> None:
        super()._reset()
        self._error = None

    def report_error(self, e: Exception) -> None:
        """Makes every later allreduce do nothing."""
        self._error = e

    def error(self) -> Optional[Exception]:
        """The last swallowed error; None if there was none since the group got its present peers."""
        return self._error

    def allreduce(self, tensors: List[torch.Tensor], opts: object) -> Work:
        # Read from the package: a replacement put there must take effect.
        from torchft import process_group

        if self._error is not None:
            return _DummyWork(tensors)
        try:
            work = super().allreduce(tensors, opts)
        except Exception as e:
            self.report_error(e)
            return _DummyWork(tensors)
        if work is None:  # `asyncOp=False`: queued on the current stream, without a work
            return _DummyWork(tensors)
        return process_group._ErrorSwallowingWork(self, work, tensors)
