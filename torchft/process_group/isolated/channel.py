"""The trainer's end of one worker: sends requests, reads answers, and lets threads wait for these.

One of the waiting threads is the leader: it reads the answers for all of them until its own operation has ended, and
then hands the lead over (`leader`). So a thread that waits alone reads its own answer, and a further thread is needed
only for futures.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from datetime import timedelta
from functools import cache, partial
from typing import Any, Callable, Optional, Sequence

import torch

from torchft.futures import _TIMEOUT_MANAGER
from torchft.process_group._errors import copied
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.completer import Completer
from torchft.process_group.isolated.devices import Devices, MakeSharing
from torchft.process_group.isolated.leader import Leadership
from torchft.process_group.isolated.operation import WorkerFailed, _FutureMetadata, _OpMetadata, release, timed_out
from torchft.process_group.isolated.sharing import Registration
from torchft.process_group.isolated.wire import Wire
from torchft.utils import poll

# A worker whose operation has passed its timeout is pinged this often, and killed if it does not answer. A healthy
# worker answers, since it reads its requests while its operations run.
_PING_EVERY_SEC = 2.0
_UNRESPONSIVE_SEC = 5.0

# If a request cannot be sent because the worker has ended: the longest wait for the worker's last message, or for the
# end of its pipe.
_LAST_WORDS_SEC = 1.0

# With this many operations in flight, answers are read before the next one is sent, so that they never fill
# the pipe.
_READ_ABOVE = 64


class Channel:
    """The trainer's end of one worker.

    Args:
        name: name of the group, for errors.
        sharings: makes the sharing of each device.
        on_broken: called once, with no lock held, when the worker can no longer be used. It has to call `devices.close`
            when the worker has ended.
        on_waiting: called before a stream waits for the worker; it has to call `ended` when the worker has ended, since
            no thread may be reading the answers.

    Attributes:
        wire: socket and pipe between trainer and worker; `wire.theirs` are the worker's ends.
        devices: the memory and events that trainer and worker share.
        asks: whether the worker's backend may fail after the worker has answered that an operation is queued.
    """

    asks = False

    def __init__(
        self, name: str, sharings: MakeSharing, on_broken: Callable[[], None], on_waiting: Callable[[], None]
    ) -> None:
        self._name = name
        self._on_broken = on_broken
        self._on_waiting = on_waiting
        self.wire = Wire()
        self.devices = Devices(
            sharings,
            lambda device, note, descriptor: self._send(
                _UNRESPONSIVE_SEC, protocol.NOTIFY, device, note, descriptor=descriptor
            ),
        )
        # Guards the attributes below. Reentrant: a garbage collection may call `close` on a thread that holds it.
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._ops: dict[int, _OpMetadata] = {}
        self._broken: Optional[Exception] = None
        self._received_at = 0.0
        self._completer = Completer(
            name, self._lock, self._lead_for_futures, lambda: self._broken is not None, self.follow
        )
        self._leadership = Leadership(self._completer.wake)
        _channels.add(self)

    # Sending

    def start(
        self,
        kind: int,
        body: Sequence[bytes],
        registrations: list[tuple[int, Registration]],
        result: Any,
        timeout_sec: float,
        stream: Optional[torch.Stream] = None,
    ) -> _OpMetadata:
        """Sends an operation.

        Raises:
            Exception: why the worker cannot be used.
        """
        op = _OpMetadata(next(self._ids), registrations, result, timeout_sec, stream)
        if self._broken is not None:
            # Checked also without the lock, which in a forked child may be held for ever by a thread of the parent.
            release(op)
            raise self._error()
        if kind == protocol.RUN:
            body = (self.devices.marks(registrations), *body)
        if len(self._ops) > _READ_ABOVE:
            self._read_what_is_there()
        if self.devices.queued:
            self.devices.release_reached()
        with self._lock:
            broken = self._broken is not None
            if not broken:
                self._ops[op.op_id] = op
        if broken:
            release(op)
            raise self._error()
        self._send(timeout_sec, kind, op.op_id, *body)
        return op

    def notify(self, kind: int, rest: bytes = b"") -> None:
        """Sends a message that has no answer."""
        self._send(_UNRESPONSIVE_SEC, kind, 0, rest)

    def _send(self, timeout: float, kind: int, operation: int, *parts: bytes, descriptor: Optional[int] = None) -> None:
        if self._broken is None:
            try:
                self.wire.send(max(timeout, _UNRESPONSIVE_SEC), kind, operation, *parts, descriptor=descriptor)
                return
            except TimeoutError:
                error: Exception = RuntimeError(
                    f"{self._name}: timed out: the worker does not take any more operations"
                )
            except OSError:
                error = self._why_it_failed()
            self.close(error)
        raise self._error()

    # Waiting

    def wait(self, op: _OpMetadata, timeout: Optional[float]) -> bool:
        """Waits until an operation has ended; False if that takes longer than `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not op.done:
            with self._lock:
                if op.done:
                    break
                signal = self._leadership.join(op)
            if signal is None:
                try:
                    while not op.done and self._read(_first_wait(op.timeout_sec, deadline)):
                        pass
                    if not op.done:
                        self._lead(lambda: op.done, op, deadline)
                finally:
                    self._step_down()
                in_time = deadline is None or time.monotonic() < deadline
            else:
                in_time = self._follow(signal, op, deadline)
            if not in_time:
                return op.done
        return True

    def _follow(self, signal: threading.Lock, op: _OpMetadata, deadline: Optional[float]) -> bool:
        """Waits until the operation has ended or there is no leader; False at the deadline."""
        left = threading.TIMEOUT_MAX if deadline is None else max(0.0, deadline - time.monotonic())
        woken = False
        try:
            # A garbage collection in `join` may have ended the operation before it had this signal.
            woken = op.done or signal.acquire(timeout=left)
        finally:
            if not woken:
                with self._lock:
                    self._leadership.leave(signal)
        return woken

    def _step_down(self) -> None:
        with self._lock:
            self._leadership.step_down()
        if self._broken is not None:
            self._close_wire()

    def _lead(self, until: Callable[[], bool], op: Optional[_OpMetadata], deadline: Optional[float]) -> None:
        """Reads answers until `until` is true, the deadline has passed, or the worker has failed."""
        pinged = None
        while not until() and self._broken is None:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            ping_at = self._ping_at(op)
            if now >= ping_at:
                if pinged is None or self._received_at > pinged:
                    pinged = now
                    try:
                        self.notify(protocol.PING)
                    except Exception:  # the error is in _broken
                        return
                elif now >= pinged + _UNRESPONSIVE_SEC:
                    self.close(RuntimeError(f"{self._name}: the worker does not respond; it is ended"))
                    return
                ping_at = now + _PING_EVERY_SEC
            wake_at = ping_at if deadline is None else min(ping_at, deadline)
            self._read(max(0.0, wake_at - now))

    def _ping_at(self, op: Optional[_OpMetadata]) -> float:
        if op is not None:
            return max(op.started + op.timeout_sec, self._received_at) + _PING_EVERY_SEC
        # The thread that completes futures waits for all operations.
        with self._lock:
            first = min((o.started + o.timeout_sec for o in self._ops.values()), default=time.monotonic() + 3600.0)
        return max(first, self._received_at) + _PING_EVERY_SEC

    def _read(self, timeout: float) -> bool:
        """Handles answers that arrive within `timeout` seconds. True if there were any. Only for the leader."""
        if self._broken is not None:
            return False
        try:
            answers = self.wire.read(timeout)
        except EOFError:
            self.close(self._worker_failed())
            return False
        if isinstance(answers, int):
            self._done(answers, b"")
            return True
        for answer in answers:
            self._handle(answer)
        return bool(answers)

    def _read_what_is_there(self) -> None:
        with self._lock:
            if not self._leadership.lead():
                return
        try:
            self._read(0.0)
        finally:
            self._step_down()

    def _handle(self, answer: protocol.Answer) -> None:
        if answer.kind == protocol.PONG:
            self._received_at = time.monotonic()
        if answer.kind == protocol.FATAL:
            self.close(protocol.decode_error(answer.rest))
            return
        if answer.kind != protocol.FAILED:
            self._done(answer.operation, answer.rest)
        elif (op := self._ops.pop(answer.operation, None)) is not None:
            op.error = protocol.decode_error(answer.rest)
            self._end(op)

    def _done(self, operation: int, marks: bytes) -> None:
        # Either the leader here or `close` removes an operation, and the one that removes it ends it.
        op = self._ops.pop(operation, None)
        if op is None:
            return
        try:
            if marks:
                op.marks = protocol.read_marks(marks)[0]
            for _, registration in op.registrations:
                registration.fetch()
        except Exception as e:
            op.error = e
        except BaseException as e:  # such as KeyboardInterrupt: meant for the leader's thread, not for the operation's
            op.error = RuntimeError(f"{self._name}: interrupted while a result was copied: {e!r}")
            raise
        finally:
            self._end(op)

    def _end(self, op: _OpMetadata) -> None:
        """Ends an operation that the caller has removed from `_ops`; so it is called once for each operation."""
        try:
            if op.marks:
                self.devices.hold(op)
            else:
                release(op)
        except Exception as e:
            op.error = op.error or e
        finally:
            with self._lock:
                op.done = True
                self._leadership.ended(op)
                if op.future is not None:
                    self._completer.ended(op)

    def _fail(self, op: _OpMetadata) -> None:
        op.error = self._error()
        op.registrations = []
        self._end(op)

    # Devices

    def follow(self, op: _OpMetadata, seconds: Optional[float] = None, began: float = 0.0) -> None:
        """Makes the current stream wait for an operation that has ended here, but perhaps not on the worker's device.
        The host waits where a stream cannot (`Sharing.follow`).

        Args:
            seconds: timeout; None: the operation's. When it has passed the worker is ended, but not if the host waits
                with a timeout of the caller.
            began: the begin of the caller's timeout for the host.

        Raises:
            Exception: the operation's error, as far as it is known now; why the worker cannot be used.
        """
        own = seconds is None
        if seconds is None:
            # NCCL knows the group's timeout only.
            seconds, began = op.timeout_sec, op.started
        self._on_waiting()
        if self._shared(self.devices.follow, op):
            if op.timer is None and not self._reached(op):
                op.timer = _TIMEOUT_MANAGER.deadlines.add(
                    timedelta(seconds=seconds), partial(self._expire, op, seconds)
                )
                if self._reached(op):  # it may have been released before it had the timer
                    op.end_timer()
            if self._broken is not None:
                raise self._error()
            return
        if not self.reach(op, began + seconds):
            error = timed_out(seconds)
            if own:
                self.close(error)
            raise error
        # On a device, an operation that has failed ends as if it had succeeded, so the backend is asked.
        self.check()

    def _reached(self, op: _OpMetadata) -> bool:
        return self._shared(self.devices.reached, op)

    def _shared(self, uses: Callable[[_OpMetadata], bool], op: _OpMetadata) -> bool:
        """Uses what the worker shares. If the worker has ended, that may be gone before its end is noticed, so an error
        first waits for that, :data:`_LAST_WORDS_SEC` at most.
        """
        try:
            return uses(op)
        except Exception as e:
            if self._fails_soon():
                raise self._error() from e
            raise

    def _expire(self, op: _OpMetadata, seconds: float) -> None:
        if not self.devices.reached(op):  # not _reached, which may wait: all deadlines of the process share this thread
            self.close(timed_out(seconds))

    def reach(self, op: _OpMetadata, deadline: float) -> bool:
        """Waits until the worker's device has finished an operation; False at the deadline.

        Raises:
            Exception: why the worker cannot be used.
        """

        def ended() -> bool:
            if self._reached(op):
                return True
            if self.has_failed():
                raise self._error()
            return False

        return poll(ended, deadline - time.monotonic())

    def check(self, timeout: Optional[float] = None) -> None:
        """Asks the worker's backend for its error. After the device has finished an operation, that includes the
        operation's error.

        Args:
            timeout: in seconds.

        Raises:
            Exception: the backend's error, or the reason why the worker cannot be used.
            TimeoutError: the worker did not answer in time.
        """
        if not self.asks:
            return
        op = self.start(protocol.CHECK, (), [], None, _UNRESPONSIVE_SEC)
        if not self.wait(op, timeout):
            raise TimeoutError(f"{self._name}: timed out: the worker did not say in {timeout} s whether it has failed")
        if op.error is not None:
            raise copied(op.error)

    def is_over(self, op: _OpMetadata) -> bool:
        """Whether an operation has ended, also on the device; does not wait."""
        if not self.is_done(op):
            return False
        return op.error is not None or self._broken is not None or self.devices.reached(op)

    def drain(self, timeout: float) -> bool:
        """Waits until the worker's device has finished all queued work; False after `timeout` seconds."""

        def drained() -> bool:
            if self.devices.queued and self._broken is None:
                self.devices.release_reached()
            return not self.devices.queued or self.has_failed()

        return poll(drained, timeout)

    # Futures

    def get_future(
        self, op: _OpMetadata, devices: list[Any], stream: Optional[torch.Stream]
    ) -> torch.futures.Future[object]:
        """The future of an operation.

        Args:
            devices: the devices of its value.
            stream: the current stream of the call; None if there are only CPU tensors. Another stream waits for the
                worker, and the future is completed on that one, so that the caller's does not wait.
        """
        with self._lock:
            if op.future is not None:
                return op.future.future
            own = None if stream is None else _own_stream(stream.device)
            op.future = metadata = _FutureMetadata(torch.futures.Future(devices=devices), own)
            if not op.done:
                self._completer.begin()
                return metadata.future
        self._completer.complete(op)
        return metadata.future

    def _lead_for_futures(self, until: Callable[[], bool]) -> bool:
        """Leads until `until` is true; False at once if another thread leads, or no future is open."""
        with self._lock:
            if not any(op.future for op in self._ops.values()) or not self._leadership.lead():
                return False
        try:
            self._lead(until, None, None)
        finally:
            self._step_down()
        return True

    # The end

    def _worker_failed(self) -> Exception:
        return WorkerFailed(f"{self._name}: the worker process has ended")

    def _why_it_failed(self) -> Exception:
        """The error for a request that could not be sent. Reads the worker's last message first, which may explain the
        failure.
        """
        self._fails_soon()
        return self._worker_failed()

    def _fails_soon(self) -> bool:
        """Whether the worker is found to be unusable within a moment."""
        deadline = time.monotonic() + _LAST_WORDS_SEC
        while not self.has_failed() and time.monotonic() < deadline:
            # Another thread reads, or the kernel has not closed the worker's descriptors yet.
            time.sleep(0.001)
        return self._broken is not None

    def ended(self) -> None:
        """The worker has ended."""
        if self._broken is None:
            self.close(self._why_it_failed())

    def _error(self) -> Exception:
        assert self._broken is not None
        return copied(self._broken)

    @property
    def broken(self) -> Optional[Exception]:
        """Why the worker cannot be used any more; None if it can."""
        return self._broken

    def has_failed(self) -> bool:
        """Whether the worker cannot be used any more. Reads its answers first, which shows its end."""
        self._read_what_is_there()
        return self._broken is not None

    def is_done(self, op: _OpMetadata) -> bool:
        """Whether an operation has ended; does not wait."""
        if not op.done:
            self._read_what_is_there()
        return op.done

    def __len__(self) -> int:
        return len(self._ops)

    def close(self, error: Exception) -> None:
        """Fails everything in flight. The first error counts."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = error
            self._leadership.close()
            ops, self._ops = self._ops, {}
        with contextlib.ExitStack() as rest:  # runs in reverse order, and each callback even if another one raises
            rest.callback(self._on_broken)
            rest.callback(self._hang_up)
            for op in reversed(ops.values()):
                rest.callback(self._fail, op)
            rest.callback(self.devices.abandon)

    def _hang_up(self) -> None:
        with self._lock:
            self._completer.wake()
            if self._leadership.taken:
                self.wire.wake()
        self.wire.hang_up()
        self._close_wire()

    def _close_wire(self) -> None:
        with self._lock:
            if self._leadership.taken:
                return
        self.wire.close()

    def _forget(self) -> None:
        """In a forked child: the operations and the wire belong to the parent."""
        if self._broken is None:
            self._broken = RuntimeError(f"{self._name}: a forked process cannot use its parent's group")
            self._leadership.close()
            # Without the lock, which may be held for ever; the child has no other thread.
            for op in self._ops.values():
                op.error, op.done = self._error(), True
        self.wire.forget()


def _first_wait(timeout_sec: float, deadline: Optional[float]) -> float:
    """Seconds that a leader waits for the first answer before it begins to ping the worker."""
    return timeout_sec if deadline is None else min(timeout_sec, max(0.0, deadline - time.monotonic()))


@cache
def _own_stream(device: torch.device) -> torch.Stream:
    """The stream on which futures of tensors on a device are completed."""
    return torch.Stream(device)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget_all() -> None:
    # If a child kept the descriptors open, the workers would not see the end of the trainer.
    for channel in list(_channels):
        channel._forget()
    _channels.clear()


os.register_at_fork(after_in_child=_forget_all)
