"""Worker processes of a data loader in a group that a signal lets leave.

torchrun and Slurm send SIGTERM to all processes of a rank, its workers included. PyTorch's workers end then, and the
rank with them, before it has read what its last steps need.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any, Optional


class WorkerInit:
    """A ``worker_init_fn`` that ignores signals. The worker ends with its loader, when it has read what it is at.

    Args:
        ignored: numbers of signals.
        then: what the user gave.
    """

    def __init__(self, ignored: Sequence[int], then: Optional[Callable[[int], Any]]) -> None:
        self._ignored = ignored
        self._then = then

    def __call__(self, worker: int) -> None:
        for number in self._ignored:
            signal.signal(number, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker)
