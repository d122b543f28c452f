"""Timeouts for futures, blocks of code and streams.

All timers of a process share one daemon thread, which starts with the first timer. A timer that fires runs
its callback on that thread, on the device that was current where the timer was set. Callbacks must be short:
abort something, fail a future. A callback that hangs would disable every other timer of the process, and the
job could stall. So a callback has ``TORCHFT_WATCHDOG_TIMEOUT_SEC`` seconds (30 by default). After that the
stacks of all threads are printed to stderr and the process exits with code 1, so that its supervisor restarts
it.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from contextlib import ContextDecorator
from datetime import timedelta
from functools import partial
from typing import Callable, ContextManager, Optional, TypeVar

import torch
from torch.futures import Future

from torchft.utils import DeviceEvent, current_device, use_device

__all__ = [
    "WATCHDOG_TIMEOUT_SEC",
    "context_timeout",
    "future_timeout",
    "future_wait",
    "stream_timeout",
]

T = TypeVar("T")

#: A timer callback that is stuck for longer ends the process, in seconds. Default: 30.
WATCHDOG_TIMEOUT_SEC = "TORCHFT_WATCHDOG_TIMEOUT_SEC"
_DEFAULT_WATCHDOG_TIMEOUT_SEC = 30.0
# After the deadline of a stream, if the capture of a graph forbids the query.
_ASK_AGAIN = timedelta(seconds=1)

_logger: logging.Logger = logging.getLogger(__name__)


def _watchdog_timeout_sec() -> float:
    """Seconds that a callback may take before the process is ended."""
    text = os.environ.get(WATCHDOG_TIMEOUT_SEC)
    if text is None:
        return _DEFAULT_WATCHDOG_TIMEOUT_SEC
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ValueError(f"{WATCHDOG_TIMEOUT_SEC}={text!r}: a positive number of seconds is needed")
    return seconds


def _end_process(callback: Callable[[], None], seconds: float) -> None:
    """Ends the process, because a timer's callback hangs, and no other timer would fire."""
    print(
        f"torchft: the timeout callback {callback!r} did not return within {seconds} s "
        f"({WATCHDOG_TIMEOUT_SEC}); exiting, the stacks of all threads follow",
        file=sys.stderr,
        flush=True,
    )
    try:
        faulthandler.dump_traceback(all_threads=True)
    finally:
        # sys.exit would end only this thread, and a normal exit would wait for the hanging one.
        os._exit(1)


class _Timer:
    """One pending callback. Runs at most once, and not at all if cancel() has returned before it is due.

    Args:
        due: the time to run it, by time.monotonic().
        device: index of the device on which the callback runs; None: on any.
        pending: the timers that have not run; it contains this one.
    """

    __slots__ = ("_callback", "_device", "_pending", "due")

    def __init__(
        self, due: float, callback: Callable[[], None], device: Optional[int], pending: dict[_Timer, None]
    ) -> None:
        self.due = due
        self._callback: Optional[Callable[[], None]] = callback
        self._device = device
        self._pending = pending
        pending[self] = None

    def cancel(self) -> None:
        """Drops the callback, and the objects that it keeps alive."""
        self._callback = None
        self._pending.pop(self, None)

    @property
    def cancelled(self) -> bool:
        return self._callback is None

    def take(self) -> Optional[Callable[[], None]]:
        """The callback, for the only call of it; None if there is none left to call."""
        callback = self._callback
        self.cancel()
        return None if callback is None else partial(_call_on, self._device, callback)


def _call_on(device: Optional[int], callback: Callable[[], None]) -> None:
    use_device(device)
    callback()


class _TimeoutManager:
    """The pending timers, and the thread that runs them.

    A step sets some timers for each of its operations, and almost all of them are cancelled. So neither wakes
    the thread, unless a timer is due before the time at which the thread looks anyway: the time of the
    earliest timer when it looked last, even if that one has been cancelled.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        # Its lock is reentrant: the garbage collector may call `schedule` at any time.
        self._cond = threading.Condition()
        self.pending: dict[_Timer, None] = {}
        self._looks_at = math.inf
        self._thread: Optional[threading.Thread] = None
        self._watchdog_sec = _DEFAULT_WATCHDOG_TIMEOUT_SEC

    def schedule(self, timeout: timedelta, callback: Callable[[], None]) -> _Timer:
        """Runs callback once on the timer thread after `timeout`, unless cancelled."""
        timer = _Timer(time.monotonic() + timeout.total_seconds(), callback, current_device(), self.pending)
        # After it was added: the thread resets the time before it looks, so that one of both sees the timer.
        if timer.due < self._looks_at:
            with self._cond:
                if self._thread is None:
                    self._start()
                if timer.due < self._looks_at:
                    self._looks_at = timer.due
                    self._cond.notify()
        return timer

    def shutdown(self) -> None:
        """Stops the thread and drops all timers. The next timer starts a new thread."""
        with self._cond:
            thread, self._thread = self._thread, None
            self.pending, self._looks_at = {}, math.inf
            self._cond.notify()
        if thread is not None and thread is not threading.current_thread():
            # A callback may be running; the process does not wait for it longer than the watchdog.
            thread.join(self._watchdog_sec)

    def _start(self) -> None:
        self._watchdog_sec = _watchdog_timeout_sec()
        self._thread = threading.Thread(target=self._run, name="torchft_timeouts", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._cond:
                if self._thread is not me:
                    return
                due = self._due()
            # Taken one by one, since a callback may cancel the others; a local name would keep its tensors.
            while due and self._thread is me:
                self._call(due.pop())

    def _due(self) -> list[_Timer]:
        """The timers that are due, the earliest one last; none after waiting once."""
        now = time.monotonic()
        if now < self._looks_at:
            self._cond.wait(min(self._looks_at - now, threading.TIMEOUT_MAX))
            return []
        self._looks_at = math.inf
        pending = sorted(self.pending, key=lambda timer: -timer.due)
        due = [timer for timer in pending if timer.due <= now]
        if len(due) < len(pending):
            self._looks_at = pending[-len(due) - 1].due
        return due

    def _call(self, timer: _Timer) -> None:
        callback = timer.take()
        if callback is None:
            return
        # Timers fire rarely, so a watchdog that lives as long as the callback is cheap enough.
        watchdog = threading.Timer(self._watchdog_sec, _end_process, (callback, self._watchdog_sec))
        watchdog.daemon = True
        watchdog.name = "torchft_timeouts_watchdog"
        watchdog.start()
        try:
            callback()
        except Exception:
            _logger.exception("a timeout callback raised")
        finally:
            watchdog.cancel()


_TIMEOUT_MANAGER = _TimeoutManager()
atexit.register(_TIMEOUT_MANAGER.shutdown)
# A forked child (a DataLoader's worker, say) inherits neither the thread nor a usable lock.
os.register_at_fork(after_in_child=_TIMEOUT_MANAGER._reset)


def _timeout_error(what: str, timeout: timedelta) -> TimeoutError:
    return TimeoutError(f"timed out: {what} did not complete within {timeout.total_seconds()} s")


def _devices() -> list[torch.device]:
    """The devices on which tensors of this process may be.

    A callback of a future takes a stream of each device that the future names. On CUDA that creates a
    context, which costs hundreds of MB, so only devices with a context are named.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.get_device_module(accelerator).is_initialized():
        return []
    indices = range(torch.accelerator.device_count())
    if accelerator.type == "cuda":
        return [torch.device("cuda", index) for index in indices if torch._C._cuda_hasPrimaryContext(index)]
    return [torch.device(accelerator.type, index) for index in indices]


def future_timeout(fut: Future[T], timeout: timedelta) -> Future[T]:
    """Returns a future that ends like `fut`, or with TimeoutError if `fut` takes longer than `timeout`.

    `fut` itself is not changed: it may still complete later.
    """
    return fut if fut.done() else timed(fut, timeout, _devices())


def timed(fut: Future[T], timeout: timedelta, devices: list[torch.device]) -> Future[T]:
    """Does the same as `future_timeout`, for a value with tensors on these devices and the CPU only."""
    if fut.done():
        return fut

    result: Future[T] = Future(devices=[*devices])
    # The timer or the future completes the result, whichever is first to take the lock, for good.
    first = threading.Lock()

    def expire() -> None:
        if first.acquire(blocking=False):
            # pyrefly: ignore [bad-argument-type]  # typed as a result
            result.set_exception(_timeout_error("future", timeout))

    timer = _TIMEOUT_MANAGER.schedule(timeout, expire)

    def complete(done: Future[T]) -> None:
        timer.cancel()
        if not first.acquire(blocking=False):
            return
        try:
            result.set_result(done.value())
        except Exception as e:
            # pyrefly: ignore [bad-argument-type]  # typed as a result
            result.set_exception(e)

    fut.add_done_callback(complete)
    return result


def future_wait(fut: Future[T], timeout: timedelta) -> T:
    """Returns the value of `fut`.

    Raises:
        TimeoutError: it was not done within `timeout`.
        Exception: the error of `fut`.
    """
    if not fut.done():
        event = threading.Event()
        fut.add_done_callback(lambda _: event.set())
        if not event.wait(max(timeout.total_seconds(), 0.0)):
            raise _timeout_error("future", timeout)
    return fut.wait()


class _StreamTimers:
    """Timers for events of streams. A timer whose event has passed is dropped as soon as a later timer is
    set. If it stayed until it is due, a timeout of a minute and a thousand operations per second would keep
    60,000 events.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._lock = threading.Lock()
        self._pending: deque[tuple[DeviceEvent, _Timer]] = deque()

    def add(self, mark: DeviceEvent, timer: _Timer) -> None:
        with self._lock:
            while self._pending and (self._pending[0][1].cancelled or _passed(self._pending[0][0])):
                self._pending.popleft()[1].cancel()
            self._pending.append((mark, timer))


_STREAM_TIMERS = _StreamTimers()
os.register_at_fork(after_in_child=_STREAM_TIMERS.reset)


class _StreamDeadline:
    """Calls `callback` unless the streams have reached a mark. An object and not a function that refers to
    itself: the garbage collector would destroy the events of such a cycle, perhaps on a thread that has no
    device yet. That makes a context on device 0.
    """

    __slots__ = ("_callback", "_mark")

    def __init__(self, mark: DeviceEvent, callback: Callable[[], None]) -> None:
        self._mark = mark
        self._callback = callback

    def __call__(self) -> None:
        try:
            reached = self._mark.known()
        except RuntimeError:  # the device has failed
            reached = False
        if reached is None:
            _STREAM_TIMERS.add(self._mark, _TIMEOUT_MANAGER.schedule(_ASK_AGAIN, self))
        elif not reached:
            self._callback()


def _passed(mark: DeviceEvent) -> bool:
    try:
        return mark.reached()
    except RuntimeError:  # the device has failed: the deadline ends the waits for it
        return False


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Calls `callback` if the work queued on the current stream is not done within `timeout`.

    The callback, and all that it refers to, is kept until the deadline, or until a later call finds that the
    work is done. So it should not refer to tensors. It is also called if the device has failed by then.

    Without an accelerator there are no streams, and nothing is watched.
    """
    if not torch.accelerator.is_available():
        return
    mark = DeviceEvent([torch.accelerator.current_stream().device])
    _STREAM_TIMERS.add(mark, _TIMEOUT_MANAGER.schedule(timeout, _StreamDeadline(mark, callback)))


class _Timed(ContextDecorator):
    """The context of `context_timeout`, cheaper than a generator: each operation on a device needs some."""

    __slots__ = ("_callback", "_timeout", "_timer")

    def __init__(self, callback: Callable[[], None], timeout: timedelta) -> None:
        self._callback = callback
        self._timeout = timeout

    def _recreate_cm(self) -> _Timed:
        return _Timed(self._callback, self._timeout)  # each call of a decorated function has its own timer

    def __enter__(self) -> None:
        self._timer = _TIMEOUT_MANAGER.schedule(self._timeout, self._callback)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


def context_timeout(callback: Callable[[], None], timeout: timedelta) -> ContextManager[None]:
    """Calls `callback` if the block takes longer than `timeout`; the block itself continues.

    Typically the callback aborts the operation that the block waits for.
    """
    return _Timed(callback, timeout)
