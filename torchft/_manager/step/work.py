"""The work that :meth:`torchft.manager.Manager.allreduce` returns: its waits raise no collective's error."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from datetime import timedelta
from typing import Any, Callable, Optional, Protocol, TypeVar, Union

import torch
import torch.distributed as dist

from torchft._manager.edge import timeout_of, work_kind
from torchft.futures import future_wait, timed
from torchft.utils import DeviceEvent, devices_of, poll
from torchft.work import _DummyWork

T = TypeVar("T")
S = TypeVar("S")


class _Reported(Protocol):
    """The object that began a work. A Manager and the collectives of a step have a ``_timeout``; for a
    stand-in without one it is that of a Manager by default.
    """

    def report_error(self, e: Exception) -> None: ...


class _SimpleFuture(torch.futures.Future[T]):
    """A future that is completed when it is made."""

    def __init__(self, value: object) -> None:
        super().__init__()
        super().set_result(value)  # type: ignore[arg-type]


class _ManagedFuture(torch.futures.Future[T]):
    """The future of a :class:`_ManagedWork`: a real ``torch.futures.Future``, so that a communication hook of
    DDP may return it.

    It is completed with the work's value even if the collective failed; the Manager has the error. A wait for
    it, or for a future of :meth:`then`, is a wait for the work: the process group's future may complete only
    in that wait, or never.
    """

    def __init__(self, managed_work: weakref.ReferenceType[_ManagedWork]) -> None:
        work = managed_work()
        super().__init__(devices=[*work._devices()] if work is not None else None)
        self._managed_work = managed_work  # weak, because the work owns its future

    def wait(self) -> T:
        work = self._managed_work()
        if work is not None and not self.done():
            work.wait()
            if not self.done():  # another thread has ended the work, and runs the callbacks now
                future_wait(self, work._timeout)
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> torch.futures.Future[S]:
        following: _ManagedFuture[S] = _ManagedFuture(self._managed_work)

        def follow(_: object) -> None:
            try:
                value = callback(self)
            except Exception as e:
                following.set_exception(e)  # type: ignore[arg-type]
            else:
                following.set_result(value)

        super().then(follow)
        return following


class _ManagedWork(dist._Work):
    """Wraps a collective: reports its failure to the Manager, and finishes its result exactly once.

    Finishing a result, such as dividing a sum, is done by the first thread that waits, or, if the future was
    requested, when the collective ends. So a caller that only waits does not pay for a callback on the
    backend's thread.

    Args:
        manager: gets the error of a failed collective, and has the timeout; named as in upstream. A Manager
            passes the collectives of its step.
        work: the process group's work.
        value: the future's value; after a failure, with its content at that time.

    Attributes, to be set before the first wait:
        on_success: called once with the result of a successful collective.
        on_end: called once with the final value, after success or failure.
        flights: the table in which this collective is listed. Its entry is removed when the collective has
            succeeded, or replaced by a mark when only the device has to finish.
        number: of the entry.
    """

    def __init__(self, manager: _Reported, work: dist._Work, value: object) -> None:
        super().__init__()
        self._report = manager.report_error
        self._timeout = timeout_of(manager)
        self._work = work
        self._kind = work_kind(work)
        self._value = value
        self.on_success: Optional[Callable[[], object]] = None
        self.on_end: Optional[Callable[[], object]] = None
        self.flights: Optional[dict[int, Union[_ManagedWork, DeviceEvent]]] = None
        self.number = 0
        # Reentrant: a failure aborts the process group, which may complete this future in the same call.
        self._lock = threading.RLock()
        self._succeeded: Optional[bool] = None  # None until it has ended
        self._mark: Optional[DeviceEvent] = (
            None  # on a device: reached when the collective has ended and its value is final
        )
        self._on_cpu = type(value) is torch.Tensor and value.is_cpu
        self._future: Optional[_ManagedFuture[object]] = None
        self._open: Optional[_ManagedFuture[object]] = None  # the same, until a thread completes it
        self._timed = False  # whether the future is completed without a wait, too
        self._asked = False  # whether the process group's future was requested
        self._ended: Optional[torch.futures.Future[Any]] = None

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Waits until the value is final, which the process group's work decides. On a device, makes the
        current stream wait for it. Callbacks of a future that was requested have run then.

        Args:
            timeout: default: the Manager's, which on a device begins at the vote.

        Returns:
            False if the collective failed; the Manager knows why, and the step will not be committed.
        """
        if self._succeeded is not None:
            return self._end(None)
        limit = self._timeout if timeout is None else timeout
        try:
            if self._kind.limited and (
                timeout is not None or self._on_cpu or not (self._kind.polls and self._devices())
            ):
                self._work.wait(limit)
            else:
                self._work.wait()
            if self._kind.foreign:
                self._check_future()
        except Exception as e:
            return self._end(e)
        return self._end(None)

    def _check_future(self) -> None:
        """Raises a future's error although the wait for the work has not, as in a test double."""
        future = None
        with contextlib.suppress(Exception):  # it may have no future
            future = self._ending()
        if future is not None and future.done():
            future.value()

    def _ending(self) -> Optional[torch.futures.Future[Any]]:
        """The future of the process group's work, which is requested once."""
        with self._lock:
            if not self._asked:
                self._asked = True
                self._ended = self._kind.future(self._work)
            return self._ended

    def over(self) -> bool:
        """Whether the collective has ended, with or without an error; on a device, there as well."""
        if self._succeeded is None:
            return self._work.is_completed()
        return self._mark is None or self._mark.reached()

    def drain(self, timeout: timedelta) -> bool:
        """Waits until the collective writes nothing any more; False if it may after the timeout."""
        if self._kind.drains:
            return self._work.drain(timeout)  # type: ignore[attr-defined]
        if self._devices():
            return poll(self._work.is_completed, timeout.total_seconds())
        deadline = time.monotonic() + timeout.total_seconds()
        with contextlib.suppress(Exception):  # the error was reported when the collective failed
            self._work.wait(timeout)
        return time.monotonic() < deadline

    def ended(self) -> bool:
        """Whether the backend has ended the collective, so that it occupies no thread.

        After an abort, its waits may end earlier (:meth:`over`), and it may stop writing earlier
        (:meth:`drain`).
        """
        return bool(self._work.ended() if self._kind.drains else self._work.is_completed())  # type: ignore[attr-defined]

    def block_current_stream(self, timeout: Optional[timedelta] = None) -> None:
        """Makes the current accelerator stream wait for the value; on a CPU the host waits.

        A work of another project may order streams only. If this work's future was requested, its completion
        then shows when the value is final.
        """
        order = self._kind.order
        if self._future is not None and self._succeeded is None and order is not None and not self._devices():
            try:
                order(self._work, self._timeout if timeout is None else timeout)
            except Exception as e:
                self._end(e)
            if self._work.is_completed() is not True:
                return
        self.wait(timeout)

    def synchronize(self) -> None:
        """As :meth:`wait`; with an accelerator, the host also waits for the current stream."""
        self.wait()
        if self._devices():
            torch.accelerator.current_stream().synchronize()

    def future_of_wait(self) -> torch.futures.Future[object]:
        """Returns the future of :meth:`get_future`, for a caller that makes sure that this work is waited
        for. Unless :meth:`get_future` is called too, only a wait completes it, and it needs no deadline.
        """
        with self._lock:
            if self._future is None:
                self._future = self._open = _ManagedFuture(weakref.ref(self))
                if self._succeeded is not None:
                    self._end(None)
            return self._future

    def get_future(self) -> torch.futures.Future[object]:
        """Returns a future that is completed with the value, at the latest after the Manager's timeout."""
        with self._lock:
            future = self.future_of_wait()
            if self._succeeded is not None or self._timed:
                return future
            self._timed = True

        def complete(done: torch.futures.Future[object]) -> None:
            try:
                done.value()
            except Exception as e:
                self._end(e)
            else:
                self._end(None)

        try:
            ended = self._ending()
            if ended is None:
                self.wait()
            else:
                # Not add_done_callback: callbacks of `then` run on a stream that is ordered behind the
                # collective's own.
                timed(ended, self._timeout, self._devices()).then(complete)
        except Exception as e:
            self._end(e)
        return future

    def _end(self, error: Optional[Exception]) -> bool:
        """Finishes value and future, once. Later calls return its outcome, with their stream behind it."""
        with self._lock:
            succeeded = self._outcome(error)
            future, self._open = self._open, None
        if future is not None:  # not under the lock, because the callbacks are the caller's
            future.set_result(self._value)
        return succeeded

    def _outcome(self, error: Optional[Exception]) -> bool:
        with self._lock:
            if self._succeeded is not None:
                if self._mark is not None:
                    self._mark.follow()  # the first call may have finished the value on another stream
                return self._succeeded
            if error is None:
                error = self._finish()
            # Under the lock: a thread that sees the outcome may rely on the Manager having the error.
            if error is not None:
                self._report(error)
            if self.on_end is not None:
                self.on_end()
            self._succeeded = error is None
            flights = self.flights
            if flights is not None and error is None:
                if self._mark is None:
                    flights.pop(self.number, None)
                else:
                    flights[self.number] = self._mark
            return self._succeeded

    def _finish(self) -> Optional[Exception]:
        """Finishes the value. On a device this is queued behind the collective, with a mark behind it."""
        try:
            if self.on_success is not None:
                self.on_success()
            if devices := self._devices():
                self._mark = DeviceEvent(devices)
        except Exception as e:
            return e
        return None

    def _devices(self) -> list[torch.device]:
        return [] if self._on_cpu else devices_of(self._value)


def managed(manager: _Reported, work: dist._Work, value: object) -> Union[_ManagedWork, _DummyWork]:
    """The work that an allreduce of a Manager returned. That of a stand-in becomes a managed work: it may be
    any work, and then its waits need a deadline.
    """
    return work if isinstance(work, (_ManagedWork, _DummyWork)) else _ManagedWork(manager, work, value)
