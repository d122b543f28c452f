"""Worker processes of a data loader that survive the SIGTERM which drains their group.

torchrun and Slurm send SIGTERM to all processes of a rank, its workers included. PyTorch's workers end then, and the
rank with them, before it has read what its last steps need.

A worker that was forked has the objects of its rank, but none of the rank's threads: to collect one of them there, a
process group with its threads say, can end the worker by a segmentation fault.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any, Optional


class WorkerInit:
    """A ``worker_init_fn``. The worker collects no object of its rank, and ignores these signals from anyone but the
    loader, which ends its workers by SIGTERM.

    Args:
        ignored: numbers of the signals.
        then: a further ``worker_init_fn`` to call; None: there is none.
    """

    def __init__(self, ignored: Sequence[int], then: Optional[Callable[[int], Any]] = None) -> None:
        self._ignored = ignored
        self._then = then

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if self._ignored:
            for number in self._ignored:
                signal.signal(number, signal.SIG_IGN)  # ignored also in threads that a library has started before
            # blocked signals stay pending, so the thread below receives them
            signal.pthread_sigmask(signal.SIG_BLOCK, self._ignored)
            threading.Thread(target=_end_with_loader, args=(self._ignored,), daemon=True).start()
        if self._then is not None:
            self._then(worker)


def _end_with_loader(ignored: Sequence[int]) -> None:
    while signal.sigwaitinfo(ignored).si_pid != os.getppid():
        pass
    os._exit(0)
