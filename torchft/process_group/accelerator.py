"""What NCCL and XCCL have in common: their operations run on a device, where nobody can wait with a deadline.

"Done" has two meanings there. `wait` returns once the current stream will wait for the operation, which
may still hang on the device. So the deadline is watched from the timer thread: when the stream has not
got past the operation in time, the group is aborted. That ends the operation, and every later one
fails until there are new peers.

An abort takes the communicator down, which may take long: it frees device memory, and NCCL itself may hang in it.
Only its beginning ends the operations, so nobody waits for its end.
"""

from __future__ import annotations

import logging
import threading
import weakref
from contextlib import contextmanager
from datetime import timedelta
from typing import Generator, Optional, TypeVar

import torch
from torch.distributed import Work

from torchft.process_group.base import BaseProcessGroup, ProcessGroup
from torchft.process_group.wrapper import ProcessGroupWrapper, _check_timeout
from torchft.utils import synchronize

T = TypeVar("T")

# PyTorch's own deadline of an operation, by which ours has struck long ago. Its watchdog takes an expired
# operation for a reason to end the process.
_NEVER = timedelta(days=7)

# How long an abort is waited for. Most are over by then; the others go on by themselves.
_ABORT_PATIENCE_SEC = 0.05

_logger: logging.Logger = logging.getLogger(__name__)


class _WorkAcceleratorTimeout(Work):
    """An operation on a device, with a deadline.

    Args:
        pg: the group to abort when the deadline has passed.
        work: the operation.
        timeout: from the moment somebody waits.
    """

    def __init__(self, pg: ProcessGroup, work: Work, timeout: timedelta) -> None:
        super().__init__()
        self._pg = pg
        self._work = work
        self._timeout = timeout
        parent = getattr(pg, "_pg", None)
        self._peers = None if parent is None else weakref.ref(parent)

    @property
    def _over(self) -> bool:
        """Whether the group was aborted, or has other peers, since the operation began."""
        return self._peers is not None and self._peers() is not getattr(self._pg, "_pg", None)

    def _abort(self) -> None:
        # A deadline of the old peers must not strike the new ones.
        if not self._over:
            self._pg.abort()

    def _watch_stream(self, timeout: timedelta) -> None:
        # Read from the package: a replacement put there must take effect.
        from torchft import process_group

        process_group.stream_timeout(self._abort, timeout)

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Makes the current stream wait for the operation; the host goes on.

        Raises:
            RuntimeError: the group was aborted, or got new peers, since the operation began.
        """
        from torchft import process_group

        if timeout is None or timeout <= timedelta(0):
            timeout = self._timeout
        # The host itself can be stuck too, while a connection is being made.
        with process_group.context_timeout(self._abort, timeout):
            if not self._work.wait():
                return False
        # PyTorch has nothing to say about an operation that an abort ended.
        if self._over:
            raise RuntimeError(
                f"{self._pg.getBackendName()}: the operation ended with its group, which was aborted or has new peers"
            )
        self._watch_stream(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: Optional[timedelta] = None) -> None:
        self.wait(timeout)

    def get_future(self) -> torch.futures.Future[object]:
        fut = self._work.get_future()

        def watch(done: torch.futures.Future[object]) -> None:
            # Runs on a stream that waits for the operation.
            self._watch_stream(self._timeout)

        fut.add_done_callback(watch)
        return fut

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> object:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()


class AcceleratorProcessGroup(ProcessGroupWrapper):
    """A group whose operations get a deadline of torchft's instead of PyTorch's.

    Args:
        timeout: of every operation that is not given one, and of connecting with new peers.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60.0)) -> None:
        super().__init__(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        # Not PyTorch's, which stays at _NEVER.
        _check_timeout(timeout)
        self._timeout = timeout

    def _interrupt(self, pg: BaseProcessGroup) -> None:
        def abort(pg: BaseProcessGroup) -> None:
            try:
                pg.abort()
            except Exception:
                _logger.exception("%s: could not abort the old group", self.getBackendName())

        thread = threading.Thread(target=abort, args=(pg,), name="torchft_abort", daemon=True)
        thread.start()
        thread.join(_ABORT_PATIENCE_SEC)

    def _opts_hook(self, opts: T) -> T:
        if not hasattr(opts, "timeout"):
            return opts
        # A copy: the caller may use its options again, and _wrap_work reads the deadline in them.
        patient = type(opts)()
        for name in dir(opts):
            if not name.startswith("_"):
                setattr(patient, name, getattr(opts, name))
        patient.timeout = _NEVER
        return patient

    def _wrap_work(self, work: Work, opts: object) -> Work:
        # Read from the package: a replacement put there must take effect.
        from torchft import process_group

        timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout <= timedelta(0):
            timeout = self._timeout
        return process_group._WorkAcceleratorTimeout(self, work, timeout)

    @contextmanager
    def _run_context(self) -> Generator[None, None, None]:
        from torchft import process_group

        with process_group.context_timeout(self.abort, self._timeout):
            yield

    def errored(self) -> Optional[Exception]:
        """Waits for the device, so that an operation that hangs shows: after the group's timeout it is aborted."""
        with self._run_context():
            synchronize()
        return super().errored()
