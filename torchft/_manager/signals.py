"""SIGTERM drains the group: it leaves at the end of a step. A process that exceeds the grace period is ended.

The handler sets a flag, and calls the handler that the script had installed before, if any. The next request
for a quorum carries the flag to the manager server, which lets all ranks of the group leave after the same
step. Python runs handlers on the main thread, between two of its instructions, so a handler does not run
while that thread hangs in a collective. A separate thread therefore enforces the grace period, and tells the
server at once: a step may be long. It learns of a signal from a file descriptor, to which Python's C handler
writes at once (signal.set_wakeup_fd).
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, Optional

from torchft._manager.settings import duration_from_env

#: Signals on which a group leaves after a step, separated by commas; empty: none. Default: none; of
#: `torchft.Job` and under `torchft run`: SIGTERM.
LEAVE_ON_ENV = "TORCHFT_LEAVE_ON"
#: Seconds from such a signal (TORCHFT_LEAVE_ON) to the end of the process: less than the launcher's, more
#: than two steps. Default: 25.
GRACE_SEC_ENV = "TORCHFT_GRACE_S"
# Below the 30 s after which torchrun and Kubernetes send SIGKILL.
_GRACE = timedelta(seconds=25)
# Two signals may be one request to drain: Slurm signals every process of a job step, and torchrun forwards
# the signal that it receives to its workers.
SAME_REQUEST_SEC = 5.0


def grace_from_env() -> timedelta:
    """Returns the grace period: how long a process may run after the signal."""
    return duration_from_env(GRACE_SEC_ENV, _GRACE)


def leave_on_from_env(*default: int) -> tuple[int, ...]:
    """Returns the signals that drain a group by default, if its script calls ``draining()``; `default`: those
    without TORCHFT_LEAVE_ON. ValueError: one is unknown or cannot be handled, or TORCHFT_GRACE_S is
    malformed.
    """
    text = os.environ.get(LEAVE_ON_ENV, ",".join(signal.Signals(number).name for number in default))
    names = [name.strip() for name in text.split(",") if name.strip()]
    allowed = {known.name: known for known in signal.Signals if known not in (signal.SIGKILL, signal.SIGSTOP)}
    if not allowed.keys() >= set(names):
        raise ValueError(
            f"{LEAVE_ON_ENV}={text!r} is not allowed; allowed: names of signals that can be handled, such "
            "as SIGTERM, separated by commas"
        )
    grace_from_env()  # checked now, so that a bad value fails at the start and not during training
    return tuple(allowed[name] for name in names)


class DrainDeadline:
    """The time by which a draining process must end. In seconds; `grace`: from the first signal."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self.forget()

    def forget(self) -> None:
        """Starts over, as if no signal had arrived."""
        self._times: list[float] = []

    def asked(self, now: float) -> None:
        """A signal arrived."""
        self._times = [*self._times[:1], now]  # the first, and the last

    def left(self, now: float) -> Optional[float]:
        """Seconds until the end of the grace period, at least 0; None if there was no signal."""
        return max(0.0, self._times[0] + self._grace - now) if self._times else None

    def over(self, now: float) -> str:
        """Why the process has to end now; empty if it may continue."""
        if self._times and self._times[-1] - self._times[0] >= SAME_REQUEST_SEC:
            return "a second signal arrived"
        return (
            f"the grace period of {GRACE_SEC_ENV}={self._grace:g} s is over" if self.left(now) == 0.0 else ""
        )


class Signals:
    """The signals on which a rank drains its group.

    Args:
        default: signals whose handlers are installed at the script's first call of ``draining()``: a script
            that never calls it would not react to them.

    Attributes:
        wanted: whether one of them has arrived.
        report: called on a separate thread when one has arrived; must not block.
    """

    def __init__(self, default: tuple[int, ...] = ()) -> None:
        self.wanted = False
        self.report: Callable[[], object] = bool
        self._default = default
        self._previous: dict[int, Any] = {}  # the previous handler of each signal
        self._logged = False

    def install(self, numbers: tuple[int, ...]) -> None:
        """Installs the handler of these signals.

        Raises:
            ValueError: there is no signal, one cannot be handled, or TORCHFT_GRACE_S is malformed.
            RuntimeError: this is not the main thread.
        """
        global _watch
        numbers = tuple(_checked(number) for number in numbers)
        if not numbers:
            raise ValueError(
                "leave_on(): no signal is given; give some, for example leave_on(signal.SIGTERM)"
            )
        grace = grace_from_env()
        if not _on_main_thread():
            raise RuntimeError(
                f"leave_on() was called on the thread {threading.current_thread().name!r}: Python lets only "
                "the main thread install handlers of signals; call it there"
            )
        if self not in _installed:
            _installed.append(self)
        if _watch is None:
            _watch = _Watch(DrainDeadline(grace.total_seconds()))
        for number in numbers:
            if number not in self._previous:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._handle)

    def install_default(self) -> None:
        """Installs the default handlers, for the script's ``draining()``; on the main thread only."""
        if self._default and _on_main_thread():
            numbers, self._default = self._default, ()
            self.install(numbers)

    def drain_request(self, log: Callable[[str], None]) -> bool:
        """Whether the request must carry this rank's wish to drain. Logs it, as a handler must not."""
        if self.wanted and not self._logged:
            self._logged = True
            log("asked to leave by a signal: this group leaves at the end of a step")
        return self.wanted

    def close(self, leaving: Callable[[], bool]) -> None:
        """Restores the previous handlers.

        A draining process keeps its handlers: while it writes its last checkpoint, for example, a second
        signal must not end it before the grace period is over.

        Args:
            leaving: returns whether the group drains, also if only another rank got the signal.
        """
        self._default = ()
        if self not in _installed or self.wanted or leaving():
            return
        _installed.remove(self)
        if _on_main_thread():  # else the handler restores them, at the next signal
            self._restore()
            if not _installed:
                _end_watch()

    def _restore(self) -> None:
        for number, previous in list(self._previous.items()):
            # A later handler stays, and may call this one: `_handle` then passes the signal on.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
                del self._previous[number]

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        if self not in _installed and signal.getsignal(number) == self._handle:
            self._restore()
            signal.raise_signal(number)
            return
        self.wanted = True
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


# Handlers, wakeup file descriptor and grace period belong to the process: all its Managers share them.
_installed: list[Signals] = []
_watch: Optional[_Watch] = None


def installed() -> list[int]:
    """The signals that any Manager of this process handles."""
    return sorted({number for signals in _installed for number in signals._previous})


def replaced(number: int) -> bool:
    """Whether the script has since installed a handler that does not call the Managers' handlers."""
    current = signal.getsignal(number)
    return not any(signals.wanted or current == signals._handle for signals in _installed)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _end_watch() -> None:
    global _watch
    if _watch is not None and _watch.close():
        _watch = None


class _Forking(threading.local):
    mask: Optional[set[int]] = None  # signal mask of the forking thread before the fork


_forking = _Forking()


def _before_fork() -> None:
    """Blocks the signals during a fork, until the child has restored its handlers. Before that, a signal to
    the child would be handled as one to its parent.
    """
    if _installed:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, installed())


def _after_fork() -> None:
    mask, _forking.mask = _forking.mask, None
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    global _watch
    for signals in _installed:
        signals._restore()
    _installed.clear()
    if _watch is not None:
        _watch.forked()
        _watch = None
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def _checked(number: int) -> int:
    try:
        known = signal.Signals(number)
    except ValueError:
        raise ValueError(f"leave_on({number!r}): no such signal; give for example signal.SIGTERM") from None
    if known in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"leave_on({known.name}): no process can handle it; give for example signal.SIGTERM")
    return known


class _Watch:
    """The thread that enforces the grace period. `deadline`: used by this thread only."""

    def __init__(self, deadline: DrainDeadline) -> None:
        self._deadline = deadline
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Signals are forwarded to the previous wakeup file descriptor, for example asyncio's.
        self._next = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="torchft_signals", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Ends the thread. Returns False, and leaves it running, if the wakeup file descriptor was replaced:
        the new owner may forward signals to this one.
        """
        current = signal.set_wakeup_fd(self._next)
        if current != self._write:
            signal.set_wakeup_fd(current)
            return False
        os.write(self._write, b"\0")
        self._thread.join()
        self._close_pipe()
        return True

    def forked(self) -> None:
        """Closes the pipe in a forked child, which does not have the thread."""
        current = signal.set_wakeup_fd(-1)
        if current != self._write:
            signal.set_wakeup_fd(current)
        self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        last = 0
        poll = select.poll()  # not select.select, which rejects file descriptors above 1023
        poll.register(self._read, select.POLLIN)
        while True:
            left = self._deadline.left(time.monotonic())
            readable = poll.poll(None if left is None else math.ceil(1000 * left))
            received = os.read(self._read, 4096) if readable else b""
            if 0 in received:
                return
            if received and self._next != -1:
                with contextlib.suppress(OSError):
                    os.write(self._next, received)
            for number in received:
                if number in installed():
                    last = number
                    self._deadline.asked(time.monotonic())
                    for signals in [] if replaced(number) else _installed:
                        if number in signals._previous:
                            signals.report()
            why = self._deadline.over(time.monotonic())
            if why and replaced(last):
                self._deadline.forget()
            elif why:
                self._end_now(last, why)
                return

    def _end_now(self, number: int, why: str) -> None:
        # No logger: a hanging thread may hold its lock.
        status = 128 + number
        name = signal.Signals(number).name
        os.write(2, f"torchft: {name}: {why}: the process ends now, with status {status}\n".encode())
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(2)  # shows where the process hangs
        os._exit(status)
