"""Worker processes of a data loader that survive the SIGTERM that drains their group.

torchrun and Slurm send SIGTERM to all processes of a rank, including its workers. PyTorch's workers would
then end, and the rank with them, before it has read the data of its last step.

A forked worker has copies of its rank's objects, but none of the rank's threads. If the garbage collector
destroys one of these objects there, such as a process group with threads, the worker may end with a
segmentation fault.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Semaphore
from typing import Any, Optional


class WorkerInit:
    """A ``worker_init_fn``. The worker does not garbage-collect objects of its rank, and ignores these
    signals unless they come from the loader, which ends its workers by SIGTERM.

    The kernel drops a signal that arrives while the same one is pending. So a SIGTERM of the loader may be
    lost if one from outside came at the same moment. PyTorch asks its workers to end by a message first, and
    Python sends SIGTERM again when the process exits, so such a worker ends later.

    Args:
        ignored: numbers of the signals.
        then: a further ``worker_init_fn`` to call; None: there is none.
        begun: a semaphore that each worker releases when it begins; None: there is none.
    """

    def __init__(
        self,
        ignored: Sequence[int],
        then: Optional[Callable[[int], Any]] = None,
        begun: Optional[Semaphore] = None,
    ) -> None:
        self._ignored = ignored
        self._then = then
        self._begun = begun

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if self._begun is not None:
            self._begun.release()
        if self._ignored:
            for number in self._ignored:
                # Ignored also in threads that a library has started before.
                signal.signal(number, signal.SIG_IGN)
            # blocked signals stay pending, so the thread below receives them
            signal.pthread_sigmask(signal.SIG_BLOCK, self._ignored)
            threading.Thread(target=_end_with_loader, args=(self._ignored,), daemon=True).start()
        if self._then is not None:
            self._then(worker)


def _end_with_loader(ignored: Sequence[int]) -> None:
    # Not os.getppid(), which is the server of the start method forkserver.
    loader = multiprocessing.parent_process()
    assert loader is not None
    while signal.sigwaitinfo(ignored).si_pid != loader.pid:
        pass
    os._exit(0)
