"""What :meth:`torchft.manager.Manager.allreduce` gives back: work that never raises into the model."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from datetime import timedelta
from typing import Callable, Optional, Protocol, TypeVar

import torch
import torch.distributed as dist

from torchft.futures import future_timeout

T = TypeVar("T")
S = TypeVar("S")


class _Reported(Protocol):
    """Whoever is told of failures."""

    _timeout: timedelta

    def _report_collective_error(self, e: Exception) -> None: ...


class _SimpleFuture(torch.futures.Future[T]):
    """A future that is done from the start."""

    def __init__(self, value: object) -> None:
        super().__init__()
        super().set_result(value)  # type: ignore[arg-type]


class _ManagedFuture(torch.futures.Future[T]):
    """The future of a :class:`_ManagedWork`: a real one, so that DDP's hooks may give it back.

    It ends with the work's value also when the collective failed; the failure is with the Manager.
    """

    def __init__(self, managed_work: weakref.ReferenceType[_ManagedWork]) -> None:
        work = managed_work()
        super().__init__(devices=[*work._devices()] if work is not None else None)
        self._managed_work = managed_work  # weak: the work owns its future


class _ManagedWork(dist._Work):
    """Wraps a collective: its failure is reported to the Manager, and its result finished exactly once.

    The finishing touch (an average's division) runs in whoever waits, or, once somebody asked for the future, when the
    collective ends. A caller that only waits so pays for no callback on the backend's thread.

    Args:
        manager: learns of failures, and gives the timeout.
        work: of the process group.
        value: what the future gives; also after a failure, as it is then.
    """

    def __init__(self, manager: _Reported, work: dist._Work, value: object) -> None:
        super().__init__()
        self._manager = manager
        self._work = work
        self._value = value
        self._on_success: Optional[Callable[[], object]] = None
        self._on_end: Optional[Callable[[], object]] = None
        # Reentrant: a failure aborts the process group, which may complete this work's future there and then.
        self._lock = threading.RLock()
        self._succeeded: Optional[bool] = None  # None until it ended
        self._future: Optional[_ManagedFuture[object]] = None

    def on_success(self, finish: Callable[[], object]) -> None:
        """Sets what is done once to the result of a collective that succeeded; before anybody waits."""
        self._on_success = finish

    def on_end(self, notice: Callable[[], object]) -> None:
        """Sets what is called once when the value is final, whatever came of it; before anybody waits."""
        self._on_end = notice

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Waits until the value is final.

        Args:
            timeout: default: the Manager's.

        Returns:
            False if the collective failed; the Manager knows why, and the step will not be committed.
        """
        if self._succeeded is not None:
            if self._future is not None:
                self._future.wait()  # orders this stream behind the one that finished the value
            return self._succeeded
        timeout = self._manager._timeout if timeout is None else timeout
        try:
            with self._lock:
                future = self._future
            if future is not None:
                future_timeout(future, timeout).wait()
            else:
                self._work.wait(timeout)
        except Exception as e:
            return self._end(e)
        return self._end(None)

    def ended(self) -> bool:
        """Whether the collective has ended, well or not."""
        return self._succeeded is not None or self._work.is_completed()

    def drain(self, timeout: timedelta) -> bool:
        """Waits until the backend is through with the collective, whatever came of it. False: not in that time."""
        drain = getattr(self._work, "drain", None)
        if drain is not None:  # of a work whose waits end at an abort, whatever the backend still does
            return bool(drain(timeout))
        deadline = time.monotonic() + timeout.total_seconds()
        with contextlib.suppress(Exception):  # it was reported when it failed
            self._work.wait(timeout)
        return time.monotonic() < deadline

    def block_current_stream(self, timeout: Optional[timedelta] = None) -> None:
        """Orders the current accelerator stream behind the value; on a CPU this waits for it."""
        self.wait(timeout)

    def synchronize(self) -> None:
        """As :meth:`wait`, and on an accelerator also for the current stream."""
        self.wait()
        if self._devices():
            torch.accelerator.current_stream().synchronize()

    def get_future(self) -> torch.futures.Future[object]:
        """A future that ends with the value, at the latest after the Manager's timeout."""
        with self._lock:
            if self._future is not None:
                return self._future
            future: _ManagedFuture[object] = _ManagedFuture(weakref.ref(self))
            self._future = future

        def complete(done: torch.futures.Future[object]) -> None:
            try:
                done.value()
            except Exception as e:
                self._end(e)
            else:
                self._end(None)
            future.set_result(self._value)

        try:
            # then, not add_done_callback: its callbacks run ordered behind the collective's own stream
            future_timeout(self._work.get_future(), self._manager._timeout).then(complete)
        except Exception as e:
            self._end(e)
            future.set_result(self._value)
        return future

    def _end(self, error: Optional[Exception]) -> bool:
        """Finishes the value, once; later calls give the first one's outcome."""
        with self._lock:
            if self._succeeded is not None:
                return self._succeeded
            if error is None and self._on_success is not None:
                try:
                    self._on_success()
                except Exception as e:
                    error = e
            # Under the lock: whoever sees the outcome may rely on the Manager knowing of the error.
            if error is not None:
                self._manager._report_collective_error(error)
            if self._on_end is not None:
                self._on_end()
            self._succeeded = error is None
            return self._succeeded

    def _devices(self) -> list[torch.device]:
        tensors = self._value if isinstance(self._value, (list, tuple)) else [self._value]
        return list({t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type != "cpu"})
