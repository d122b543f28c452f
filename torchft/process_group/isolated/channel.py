"""The trainer's end of one worker: requests out, answers in, and threads that wait for them.

Of the threads that wait, one leads: it reads the answers, for all of them, until its own operation has ended, and then
hands the lead over (`leader`). So a thread that waits alone reads its own answer, and no thread is needed as long as
nobody asks for a future.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import weakref
from typing import Any, Callable, Optional, Sequence

import torch

from torchft.process_group._errors import copied
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.completer import Completer
from torchft.process_group.isolated.devices import Devices, MakeSharing
from torchft.process_group.isolated.leader import Leadership
from torchft.process_group.isolated.operation import WorkerFailed, _FutureMetadata, _OpMetadata, release
from torchft.process_group.isolated.sharing import Registration
from torchft.process_group.isolated.wire import Wire
from torchft.utils import poll

# A worker whose operation has passed its timeout is pinged this often, and killed if it does not answer. It
# reads its requests all the time, whatever its operations do.
_PING_EVERY_SEC = 2.0
_UNRESPONSIVE_SEC = 5.0

# How long it takes at most until the end of a worker is read after a request could not be sent for it.
_LAST_WORDS_SEC = 1.0

# With this many operations in flight, answers are read before the next one is sent, so that they never fill
# the pipe.
_READ_ABOVE = 64


class Channel:
    """The trainer's end.

    Args:
        name: of the group, for errors.
        sharings: makes the sharing of each device.
        on_broken: called once, with no lock held, when the worker is of no use any more. It shall see to it that
            `devices.close` is called as soon as the worker has ended.

    Attributes:
        wire: what connects the two; `wire.theirs` is for the worker.
        devices: what the two share.
        asks: whether the worker's backend may fail after it has answered that an operation is queued.
    """

    asks = False

    def __init__(self, name: str, sharings: MakeSharing, on_broken: Callable[[], None]) -> None:
        self._name = name
        self._on_broken = on_broken
        self.wire = Wire()
        self.devices = Devices(
            sharings,
            lambda device, note, descriptor: self._send(
                _UNRESPONSIVE_SEC, protocol.TELL, device, note, descriptor=descriptor
            ),
        )
        # Guards what follows. A garbage collection may close this on a thread that is in here already.
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._ops: dict[int, _OpMetadata] = {}
        self._broken: Optional[Exception] = None
        self._heard = 0.0
        self._completer = Completer(
            name, self.devices, self._lock, self._lead_for_futures, lambda: self._broken is not None, self.check
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
            Exception: why the worker is of no use.
        """
        op = _OpMetadata(next(self._ids), registrations, result, timeout_sec, stream)
        if self._broken is not None:
            # Here, too: in a forked child the lock may be another thread's, for ever.
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

    def tell(self, kind: int, rest: bytes = b"") -> None:
        """Sends something that is not answered."""
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
                error = self._why_it_died()
            self.close(error)
        raise self._error()

    # Waiting

    def wait(self, op: _OpMetadata, timeout: Optional[float]) -> bool:
        """Waits until an operation has ended; False when that takes longer than `timeout` seconds."""
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
        """Waits until the operation has ended or nobody leads; False at the deadline."""
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
        """Reads answers until there is no more need to, the deadline has passed, or the worker is lost."""
        pinged = None
        while not until() and self._broken is None:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                return
            ping_at = self._ping_at(op)
            if now >= ping_at:
                if pinged is None or self._heard > pinged:
                    pinged = now
                    try:
                        self.tell(protocol.PING)
                    except Exception:  # what broke is kept
                        return
                elif now >= pinged + _UNRESPONSIVE_SEC:
                    self.close(RuntimeError(f"{self._name}: the worker does not respond; it is ended"))
                    return
                ping_at = now + _PING_EVERY_SEC
            wake_at = ping_at if deadline is None else min(ping_at, deadline)
            self._read(max(0.0, wake_at - now))

    def _ping_at(self, op: Optional[_OpMetadata]) -> float:
        if op is not None:
            return max(op.started + op.timeout_sec, self._heard) + _PING_EVERY_SEC
        # Whoever completes futures waits for all of them.
        with self._lock:
            first = min((o.started + o.timeout_sec for o in self._ops.values()), default=time.monotonic() + 3600.0)
        return max(first, self._heard) + _PING_EVERY_SEC

    def _read(self, timeout: float) -> bool:
        """Handles what answers there are, or come within `timeout` seconds; whether any came. Only for the leader."""
        if self._broken is not None:
            return False
        try:
            answers = self.wire.read(timeout)
        except EOFError:
            self.close(self._worker_died())
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
            self._heard = time.monotonic()
        if answer.kind == protocol.FATAL:
            self.close(protocol.decode_error(answer.rest))
            return
        if answer.kind != protocol.FAILED:
            self._done(answer.operation, answer.rest)
        elif (op := self._ops.pop(answer.operation, None)) is not None:
            op.error = protocol.decode_error(answer.rest)
            self._end(op)

    def _done(self, operation: int, marks: bytes) -> None:
        # Whoever takes it out ends it: the leader here, or `close`.
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
        except BaseException as e:  # of the thread that leads: whoever waits for this operation has no part in it
            op.error = RuntimeError(f"{self._name}: interrupted while a result was copied: {e!r}")
            raise
        finally:
            self._end(op)

    def _end(self, op: _OpMetadata) -> None:
        """Ends an operation that was taken out: nobody else does."""
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

    def reach(self, op: _OpMetadata, deadline: float) -> bool:
        """Waits until the worker's device has done an operation; False when it has not at the deadline.

        Raises:
            Exception: why the worker is of no use.
        """

        def ended() -> bool:
            if self.devices.reached(op):
                return True
            if self.lost():
                raise self._error()
            return False

        return poll(ended, deadline - time.monotonic())

    def check(self, timeout: Optional[float] = None) -> None:
        """Asks the worker's backend for an error. After the device has passed an operation, that is one of it, too.

        Args:
            timeout: in seconds.

        Raises:
            Exception: what it reports, why the worker is of no use, or TimeoutError.
        """
        if not self.asks:
            return
        op = self.start(protocol.CHECK, (), [], None, _UNRESPONSIVE_SEC)
        if not self.wait(op, timeout):
            raise TimeoutError(f"{self._name}: timed out: the worker did not say in {timeout} s whether it has failed")
        if op.error is not None:
            raise copied(op.error)

    def is_over(self, op: _OpMetadata) -> bool:
        """Whether an operation has ended, and the device has done it; does not wait."""
        if not self.is_done(op):
            return False
        return op.error is not None or self._broken is not None or self.devices.reached(op)

    def drain(self, timeout: float) -> bool:
        """Waits until the worker's device has done what was queued; False when it has not in `timeout` seconds."""

        def drained() -> bool:
            if self.devices.queued and self._broken is None:
                self.devices.release_reached()
            return not self.devices.queued or self._broken is not None

        return poll(drained, timeout)

    # Futures

    def get_future(
        self, op: _OpMetadata, devices: list[Any], stream: Optional[torch.Stream]
    ) -> torch.futures.Future[object]:
        """The future of an operation, completed on `stream`."""
        with self._lock:
            if op.future is not None:
                return op.future.future
            op.future = metadata = _FutureMetadata(torch.futures.Future(devices=devices), stream)
            if not op.done:
                self._completer.begin()
                return metadata.future
        self._completer.complete(op)
        return metadata.future

    def _lead_for_futures(self, until: Callable[[], bool]) -> bool:
        """Leads until that is true; False at once when somebody else does, or there is nothing to wait for."""
        with self._lock:
            if not any(op.future for op in self._ops.values()) or not self._leadership.lead():
                return False
        try:
            self._lead(until, None, None)
        finally:
            self._step_down()
        return True

    # The end

    def _worker_died(self) -> Exception:
        return WorkerFailed(f"{self._name}: the worker process died")

    def _why_it_died(self) -> Exception:
        """For whoever could not send: what it said last may not have been read yet."""
        deadline = time.monotonic() + _LAST_WORDS_SEC
        while self._broken is None and time.monotonic() < deadline:
            self._read_what_is_there()
            # Somebody else reads, or the kernel is not through with its descriptors.
            time.sleep(0.001)
        return self._worker_died()

    def _error(self) -> Exception:
        assert self._broken is not None
        return copied(self._broken)

    @property
    def broken(self) -> Optional[Exception]:
        """Why the worker is of no use any more."""
        return self._broken

    def lost(self) -> bool:
        """Whether the worker is of no use any more; looks whether it still lives."""
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
        with contextlib.ExitStack() as rest:  # backwards, and each part whatever another one raises
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
        """In a forked child: these are the parent's."""
        if self._broken is None:
            self._broken = RuntimeError(f"{self._name}: a forked process cannot use its parent's group")
            self._leadership.close()
            # The lock may be held for ever; nobody else is here.
            for op in self._ops.values():
                op.error, op.done = self._error(), True
        self.wire.forget()


def _first_wait(timeout_sec: float, deadline: Optional[float]) -> float:
    """Seconds that a leader waits for the first answer before it looks around."""
    return timeout_sec if deadline is None else min(timeout_sec, max(0.0, deadline - time.monotonic()))


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget_all() -> None:
    # A child that kept them open would hide the end of the trainer from the workers.
    for channel in list(_channels):
        channel._forget()
    _channels.clear()


os.register_at_fork(after_in_child=_forget_all)
