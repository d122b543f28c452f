"""A connection attempt that an abort can end.

PyTorch's stores and Gloo wait in C++ for missing peers until a timeout, and offer no way to end that wait. A
peer that fails between the quorum and the connection would delay the others until that timeout.
"""

from __future__ import annotations

import threading
import time
import traceback
from datetime import timedelta
from typing import Any, Callable, Generic, Optional, TypeVar

from torchft.utils import DeviceThread

T = TypeVar("T")

# Seconds beyond the call's own timeouts, so that its error, which names the cause, comes first.
_GRACE_SEC = 5.0
# Seconds between two looks for a reason to end a wait.
_LOOK_SEC = 0.01

_thread = threading.local()


def running() -> Optional[ConnectionAttempt[Any]]:
    """The attempt whose call runs on this thread."""
    return getattr(_thread, "attempt", None)


def check() -> None:
    """Raises the error with which the attempt of this thread was abandoned, if it was."""
    attempt = running()
    if attempt is not None and attempt.abandoned is not None:
        raise attempt.abandoned


class ConnectionAttempt(Generic[T]):
    """A call on a separate thread; after `abandon`, its result is discarded.

    `start` or `result` starts the thread, so the attempt can be registered for an abort before that.

    Args:
        call: may wait for peers.
        discard: gets a list with the result of `call` if nobody takes that, and must empty the list.
        timeout: timeout of each wait in the call, for the store and then for the peers.
        standby: whether the caller keeps its present peers meanwhile.

    Attributes:
        standby: the argument.
        error: why there is no result; None before the end of the call, and if it succeeded.
        abandoned: the error passed to the first `abandon`, also if the result had been taken by then; None:
            there was none.
    """

    def __init__(
        self,
        call: Callable[[], T],
        discard: Callable[[list[T]], None],
        timeout: timedelta,
        standby: bool = False,
    ) -> None:
        self._call: Optional[Callable[[], T]] = call
        self._discard = discard
        self._timeout = timeout
        self.standby = standby
        self._lock = threading.Lock()
        self._started = False
        self._ended = threading.Event()
        self._value: list[T] = []
        self.error: Optional[BaseException] = None
        self.abandoned: Optional[Exception] = None
        self._interrupts: list[Callable[[], object]] = []

    def start(self) -> None:
        """Makes the call, once."""
        if not self._started:
            self._started = True
            DeviceThread(target=self._run, name="torchft_connect").start()

    @property
    def ended(self) -> bool:
        """Whether the call has ended, or was abandoned."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Waits for the end of the call, at most this long. Returns whether it has ended."""
        return self._ended.wait(seconds)

    @property
    def made(self) -> bool:
        """Whether there is a result that nobody has taken yet."""
        return bool(self._value)

    def result(self) -> T:
        """Makes the call unless that was done, and waits for its result or error. To be called once."""
        self.start()
        seconds = min(2 * self._timeout.total_seconds() + _GRACE_SEC, threading.TIMEOUT_MAX)
        if not self._ended.wait(seconds):
            limit = f"timeout={self._timeout}"
            text = f"timed out: connecting with the peers, with {limit}, has not ended in {seconds:g} s"
            self.abandon(RuntimeError(text))
        with self._lock:
            if self.error is not None:
                raise self.error
            return self._value.pop()

    def abandon(self, error: Exception) -> None:
        """Ends the wait with this error, and discards a result that nobody has taken."""
        with self._lock:
            self.abandoned = self.abandoned or error
            if self._ended.is_set() and not self._value:
                return
            untaken, self._value = self._value, []
            self.error = error
            self._ended.set()
            interrupts = self._interrupts
        for interrupt in interrupts:
            interrupt()
        if untaken:
            self._discard(untaken)

    def when_abandoned(self, interrupt: Callable[[], object]) -> None:
        """Registers a function that ends a wait of the call; it is called at once after `abandon`."""
        with self._lock:
            self._interrupts.append(interrupt)
            abandoned = self.abandoned
        if abandoned is not None:
            interrupt()

    def _run(self) -> None:
        error: Optional[BaseException] = None
        made: list[T] = []
        # The call may refer to a group, which no other thread may destroy: `result`'s error keeps this.
        call, self._call = self._call, None
        assert call is not None
        _thread.attempt = self
        try:
            made.append(call())
        except BaseException as e:
            _forget_frames(e)
            error = e
        del _thread.attempt, call
        with self._lock:
            self._interrupts = []  # they may refer to what was made
            late = self._ended.is_set()
            if not late:
                self._value, self.error = made, error
                self._ended.set()
        del error  # its traceback refers to this frame
        if late and made:
            self._discard(made)


def _forget_frames(error: Optional[BaseException]) -> None:
    """Clears the local variables in the traceback of an error: they may refer to a group."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def in_time(call: Callable[[], T], timeout: timedelta, check: Callable[[], object] = lambda: None) -> T:
    """Waits for a call that may ignore its timeout: a TCPStore does not answer while its process is
    suspended.

    Args:
        call: continues on its own thread after an error. It learns of that by :func:`running`.
        timeout: how long to wait.
        check: called again and again; its error ends the wait.

    Raises:
        Exception: the error of the call or of `check`.
        TimeoutError: the call has not ended in time.
    """
    attempt = ConnectionAttempt(call, list.clear, timeout)
    attempt.start()
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        while not attempt.wait(_LOOK_SEC):
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out: there was no answer within {timeout}")
    except Exception as e:
        attempt.abandon(e)
    return attempt.result()
