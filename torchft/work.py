"""A ``Work`` that is complete from the start, for operations that need no communication."""

from __future__ import annotations

from datetime import timedelta
from typing import Optional, cast

import torch
import torch.distributed as dist

__all__: list[str] = []


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

    # The methods that dist._Work inherits from C++ describe an operation that has not begun, so all are overridden.

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
