"""The trainer's end of one worker: requests out, answers in, and threads that wait for them.

Nobody is woken for another one's sake. Of the threads that wait, one leads: it reads the answers, for all of
them, until its own operation has ended, and then hands the lead over. So a thread that waits alone reads its
own answer, and no thread is needed as long as nobody asks for a future.
"""

from __future__ import annotations

import array
import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Generator, Iterable, Optional, Sequence

import torch

from torchft.process_group._operations import copied
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.sharing import Lease, Sharing, is_plain
from torchft.utils import get_stream_context

_logger: logging.Logger = logging.getLogger(__name__)

# A worker whose operation is overdue is asked for a sign of life this often, and given up without one. It
# reads its requests all the time, whatever its operations do.
_PING_EVERY_SEC = 2.0
_UNRESPONSIVE_SEC = 5.0

# How long it takes at most until the end of a worker is read after a request could not be sent for it.
_LAST_WORDS_SEC = 1.0

# Devices have nothing better to offer across processes than to be asked.
_ASK_DEVICE_EVERY_SEC = 0.0005

# With this many operations in flight, answers are read before the next one is sent, so that they never fill
# the pipe.
_READ_ABOVE = 64

_ANSWERS_AT_ONCE = 1 << 14  # bytes
_ANSWERS_SIZE = 1 << 20  # bytes: what an unprivileged process may ask for


class WorkerDied(RuntimeError):
    """The worker's process has ended without a word."""


@dataclass
class _FutureMetadata:
    """A future that somebody asked for, and the stream on which it is completed."""

    future: torch.futures.Future[object]
    stream: Optional[torch.Stream]

    @contextlib.contextmanager
    def set_stream(self) -> Generator[None, None, None]:
        """Makes its stream the current one."""
        with get_stream_context(self.stream):
            yield


class _OpMetadata:
    """An operation that was sent to the worker.

    Args:
        op_id: its number.
        leases: (device, lease) of every tensor.
        result: what its future gives: the caller's tensors.
        patience: seconds until a silent worker is asked whether it lives.
        stream: the current one when it was called.
    """

    __slots__ = (
        "done", "error", "followers", "future", "leases", "marks", "op_id", "patience", "result", "started", "stream",
    )  # fmt: skip

    def __init__(
        self,
        op_id: int,
        leases: list[tuple[int, Lease]],
        result: Any,
        patience: float,
        stream: Optional[torch.Stream] = None,
    ) -> None:
        self.op_id = op_id
        self.leases = leases
        self.result = result
        self.patience = patience
        self.stream = stream
        self.started = time.monotonic()
        self.done = False
        self.error: Optional[Exception] = None
        # Of the worker's device, when it is done.
        self.marks: Sequence[protocol.Item] = ()
        self.future: Optional[_FutureMetadata] = None
        # Locks that followers wait at.
        self.followers: list[threading.Lock] = []

    @contextlib.contextmanager
    def set_stream(self) -> Generator[None, None, None]:
        """Makes the stream it was called on the current one."""
        with get_stream_context(self.stream):
            yield


class Channel:
    """The trainer's end.

    Args:
        name: of the group, for errors.
        sharings: makes the sharing of each device, by its number, given how to tell the worker's.
        on_broken: called once, with no lock held, when the worker is of no use any more. It shall see to it that
            `close_sharings` is called as soon as the worker has ended.
    """

    def __init__(
        self,
        name: str,
        sharings: Callable[[int, Callable[[bytes, Optional[int]], None]], Sharing],
        on_broken: Callable[[], None],
    ) -> None:
        self._name = name
        self._make_sharing = sharings
        self._on_broken = on_broken
        self._sharings: dict[int, Sharing] = {}
        self._sharings_lock = threading.Lock()
        # Whether some device has marks.
        self._marking = False

        # SEQPACKET keeps the messages apart, and carries file descriptors. Answers are written by several threads
        # of the worker, some of Gloo's: a pipe is faster, and holds thousands of them.
        self._requests, self.worker_requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers, self.worker_answers = os.pipe()
        with contextlib.suppress(OSError):
            self._grow(self._answers)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._send_poll = select.poll()
        self._send_poll.register(self._requests, select.POLLOUT)

        # A garbage collection may close this on a thread that is in here already.
        self._send_lock = threading.RLock()
        # Guards what follows.
        self._lock = threading.RLock()
        self._ids = itertools.count(1)
        self._ops: dict[int, _OpMetadata] = {}
        self._leading = False
        self._followers: list[threading.Lock] = []
        self._broken: Optional[Exception] = None
        self._closed = False
        self._rest = b""
        self._heard = 0.0
        # Operations whose leases are released when the worker's device has reached the mark.
        self._queued: list[_OpMetadata] = []
        # Ended operations whose future is to be completed, and the thread that does so.
        self._ended: list[_OpMetadata] = []
        self._completer: Optional[threading.Thread] = None
        self._completer_signal = threading.Lock()
        _channels.add(self)

    @staticmethod
    def _grow(pipe: int) -> None:
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _ANSWERS_SIZE)

    # Sending

    def start(
        self,
        kind: int,
        body: bytes,
        leases: list[tuple[int, Lease]],
        result: Any,
        patience: float,
        stream: Optional[torch.Stream] = None,
    ) -> _OpMetadata:
        """Sends an operation.

        Raises:
            Exception: why the worker is of no use.
        """
        op = _OpMetadata(next(self._ids), leases, result, patience, stream)
        if kind == protocol.RUN:
            body = (self._marks(leases) if self._marking else protocol.NO_MARKS) + body
        if len(self._ops) > _READ_ABOVE:
            self._read_what_is_there()
        if self._queued:
            self._release_reached()
        with self._lock:
            broken = self._broken is not None
            if not broken:
                self._ops[op.op_id] = op
        if broken:
            release(op)
            raise self._error()
        self._send(protocol.request(kind, op.op_id, body), None, patience)
        return op

    def _marks(self, leases: list[tuple[int, Lease]]) -> bytes:
        marks = [(device, self._sharings[device].mark()) for device in {device for device, _ in leases}]
        return protocol.marks([item for item in marks if item[1]])

    def tell(self, kind: int, rest: bytes = b"") -> None:
        """Sends something that is not answered."""
        self._send(protocol.request(kind, 0, rest), None, _UNRESPONSIVE_SEC)

    def sharing(self, device: int) -> Sharing:
        """The trainer's end for a kind of device; the first tensor of that kind makes it."""
        sharing = self._sharings.get(device)
        if sharing is None:
            with self._sharings_lock:
                sharing = self._sharings.get(device)
                if sharing is None:

                    def tell(note: bytes, descriptor: Optional[int]) -> None:
                        data = protocol.request(protocol.TELL, device, note)
                        self._send(data, descriptor, _UNRESPONSIVE_SEC)

                    sharing = self._sharings[device] = self._make_sharing(device, tell)
                    self._marking = self._marking or not is_plain(sharing)
        return sharing

    def _send(self, data: bytes, descriptor: Optional[int], timeout: float) -> None:
        """Waits only while the worker does not read, which it does all the time."""
        deadline = None
        with self._send_lock:
            while True:
                if self._broken is not None:
                    raise self._error()
                try:
                    send(self._requests, data, () if descriptor is None else (descriptor,))
                    return
                except BlockingIOError:
                    pass
                except OSError:
                    error = self._why_it_died()
                    break
                deadline = deadline or time.monotonic() + max(timeout, _UNRESPONSIVE_SEC)
                self._send_poll.poll(100)
                if time.monotonic() > deadline:
                    error = RuntimeError(f"{self._name}: the worker does not take any more operations")
                    break
        self.close(error)
        raise self._error()

    # Waiting

    def wait(self, op: _OpMetadata, timeout: Optional[float]) -> bool:
        """Waits until an operation has ended; False when that takes longer than `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not op.done:
            signal = None
            with self._lock:
                if op.done:
                    break
                if self._leading:
                    signal = threading.Lock()
                    signal.acquire()
                    op.followers.append(signal)
                    self._followers.append(signal)
                else:
                    self._leading = True
            if signal is None:
                try:
                    while not op.done and self._read(_first_wait(op.patience, deadline)):
                        pass
                    if not op.done:
                        self._lead(lambda: op.done, op, deadline)
                finally:
                    self._step_down()
            else:
                self._follow(signal, deadline)
                if op.done or (deadline is not None and time.monotonic() >= deadline):
                    # It may have been handed a lead that it does not need any more.
                    with self._lock:
                        self._pass_on()
            if deadline is not None and not op.done and time.monotonic() >= deadline:
                return False
        return True

    def _follow(self, signal: threading.Lock, deadline: Optional[float]) -> None:
        """Waits until the operation has ended or it is this thread's turn to lead."""
        # No wait is for ever: whoever leads ends, and every end of leading wakes a follower.
        left = threading.TIMEOUT_MAX if deadline is None else max(0.0, deadline - time.monotonic())
        signal.acquire(timeout=left)
        with self._lock, contextlib.suppress(ValueError):
            self._followers.remove(signal)

    def _step_down(self) -> None:
        with self._lock:
            self._leading = False
            if self._broken is None:
                self._pass_on()
                return
        self._close_descriptors()

    def _pass_on(self) -> None:
        """Wakes somebody to lead. The lock is held."""
        if self._leading:
            return
        if self._followers:
            self._followers.pop(0).release()
        elif self._completer is not None and self._completer_signal.locked():
            self._completer_signal.release()

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
            return max(op.started + op.patience, self._heard) + _PING_EVERY_SEC
        # Whoever completes futures waits for all of them.
        with self._lock:
            first = min((o.started + o.patience for o in self._ops.values()), default=time.monotonic() + 3600.0)
        return max(first, self._heard) + _PING_EVERY_SEC

    def _read(self, timeout: float) -> bool:
        """Handles what answers there are, or come within `timeout` seconds; whether any came. Only for the leader."""
        ready = self._poll.poll(timeout * 1000)
        if not ready or self._broken is not None:
            return False
        if len(ready) == 1 and ready[0][0] == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return False
        data = os.read(self._answers, _ANSWERS_AT_ONCE)
        if not data:
            self.close(self._worker_died())
            return False
        answers, self._rest = protocol.read_answers(self._rest + data if self._rest else data)
        for answer in answers:
            self._handle(answer)
        return True

    def _read_what_is_there(self) -> None:
        with self._lock:
            if self._leading or self._broken is not None:
                return
            self._leading = True
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
        # Whoever takes it out ends it: the leader here, or `close`.
        op = self._ops.pop(answer.operation, None)
        if op is None:
            return
        if answer.kind != protocol.FAILED:
            op.marks = protocol.read_marks(answer.rest)[0] if answer.rest else ()
            try:
                for _, lease in op.leases:
                    lease.fetch()
            except Exception as e:
                op.error = e
        else:
            op.error = protocol.decode_error(answer.rest)
        self._end(op)

    def _end(self, op: _OpMetadata) -> None:
        if not op.marks:
            release(op)
        with self._lock:
            if op.marks:
                self._queued.append(op)
            op.done = True
            for signal in op.followers:
                # One that was handed the lead is awake already.
                if signal in self._followers:
                    self._followers.remove(signal)
                    signal.release()
            op.followers.clear()
            if op.future is None:
                return
            self._ended.append(op)
            if self._completer_signal.locked():
                self._completer_signal.release()

    # Devices

    def follow(self, op: _OpMetadata) -> None:
        """The current stream waits for what the worker's device does for an operation."""
        for device, mark in op.marks:
            self._sharings[device].follow(mark)

    def _reached(self, op: _OpMetadata) -> bool:
        return all(self._sharings[device].reached(mark) for device, mark in op.marks)

    def reach(self, op: _OpMetadata, deadline: float) -> bool:
        """Waits until the worker's device has done an operation; False when it has not at the deadline.

        Raises:
            Exception: why the worker is of no use.
        """
        while not self._reached(op):
            if self.lost():
                raise self._error()
            if time.monotonic() >= deadline:
                return False
            time.sleep(_ASK_DEVICE_EVERY_SEC)
        return True

    def _release_reached(self) -> None:
        with self._lock:
            queued, self._queued = self._queued, []
        waiting = []
        for op in queued:
            if self._reached(op):
                release(op)
            else:
                waiting.append(op)
        with self._lock:
            self._queued += waiting

    def drain(self, timeout: float) -> bool:
        """Waits until the worker's device has done what was queued; False when it has not in `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._queued and self._broken is None:
            self._release_reached()
            if time.monotonic() >= deadline:
                return not self._queued
            if self._queued:
                time.sleep(_ASK_DEVICE_EVERY_SEC)
        return True

    # Futures

    def get_future(
        self, op: _OpMetadata, devices: list[Any], stream: Optional[torch.Stream]
    ) -> torch.futures.Future[object]:
        """The future of an operation; with it begins a thread that completes futures as operations end."""
        with self._lock:
            if op.future is not None:
                return op.future.future
            op.future = metadata = _FutureMetadata(torch.futures.Future(devices=devices), stream)
            if not op.done:
                if self._completer is None:
                    self._completer_signal.acquire(blocking=False)
                    self._completer = threading.Thread(
                        target=self._complete, name="torchft_isolated_futures", daemon=True
                    )
                    self._completer.start()
                elif self._completer_signal.locked():
                    self._completer_signal.release()
                return metadata.future
        self._set(op)
        return metadata.future

    def _complete(self) -> None:
        """Callbacks run here, one after another. It leads while nobody else does and some future is open."""
        while True:
            with self._lock:
                ended, self._ended = self._ended, []
                lead = not ended and not self._leading and any(o.future for o in self._ops.values())
                if lead:
                    self._leading = True
                elif not ended:
                    if self._broken is not None:
                        return
                    self._completer_signal.acquire(blocking=False)
            if lead:
                try:
                    self._lead(lambda: bool(self._ended), None, None)
                finally:
                    self._step_down()
            elif ended:
                for op in ended:
                    self._set(op)
                # Held on to, they would keep their tensors until the next ones end.
                del ended, op
            else:
                # Until something ends, breaks, or nobody leads any more.
                self._completer_signal.acquire()

    def _set(self, op: _OpMetadata) -> None:
        metadata = op.future
        assert metadata is not None
        error = op.error
        try:
            with metadata.set_stream():
                if error is None:
                    try:
                        self.follow(op)
                    except Exception as e:
                        error = e
                if error is None:
                    metadata.future.set_result(op.result)
                else:
                    # pyrefly: ignore [bad-argument-type]  # typed as a result
                    metadata.future.set_exception(error)
        except Exception:
            # A callback that raises fails the future that it made, not this one.
            _logger.exception("%s: could not complete a future", self._name)

    # The end

    def _worker_died(self) -> Exception:
        return WorkerDied(f"{self._name}: the worker process died")

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
            ops, self._ops = self._ops, {}
            queued, self._queued = self._queued, []
            leading = self._leading
        for op in ops.values():
            op.error = self._error()
            op.leases = []
            self._end(op)
        for op in queued:
            op.leases = []
        with self._lock:
            if self._completer is not None and self._completer_signal.locked():
                self._completer_signal.release()
            if leading:
                os.eventfd_write(self._wake, 1)
        with contextlib.suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)
        if not leading:
            self._close_descriptors()
        self._on_broken()

    def _close_descriptors(self) -> None:
        with self._send_lock, self._lock:
            if self._closed or self._leading:
                return
            self._closed = True
            self._requests.close()
            os.close(self._answers)
            os.close(self._wake)

    @property
    def uses_devices(self) -> bool:
        """Whether there is more to give back than memory of the host."""
        return any(self._sharings)

    def close_sharings(self) -> None:
        """To be called when the worker has ended: until then its device may write."""
        for sharing in list(self._sharings.values()):
            sharing.close()

    def _forget(self) -> None:
        """In a forked child: these are the parent's."""
        self._broken = RuntimeError(f"{self._name}: a forked process cannot use its parent's group")
        for descriptor in (self._requests.fileno(), self._answers, self._wake):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._requests.detach()
        self._closed = True


def _first_wait(patience: float, deadline: Optional[float]) -> float:
    """Seconds that a leader waits for the first answer before it looks around."""
    return patience if deadline is None else min(patience, max(0.0, deadline - time.monotonic()))


def release(op: _OpMetadata) -> None:
    leases, op.leases = op.leases, []
    for _, lease in leases:
        lease.release()


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget_all() -> None:
    # A child that kept them open would hide the trainer's death from the workers.
    for channel in list(_channels):
        if not channel._closed:
            channel._forget()
    _channels.clear()


os.register_at_fork(after_in_child=_forget_all)


# Messages longer than a socket takes travel as memory.

_LONG = 1 << 15
_MEMORY = b"\xff"
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_ANCILLARY = socket.CMSG_SPACE(4 * 4)  # four descriptors


def send(to: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends a message, without waiting.

    Raises:
        BlockingIOError: the other end does not read.
        OSError: it is gone.
    """
    if len(data) > _LONG:
        memory = os.memfd_create("torchft-message", os.MFD_CLOEXEC)
        try:
            os.truncate(memory, len(data))
            os.pwrite(memory, data, 0)
            send(to, _MEMORY, (memory, *descriptors))
        finally:
            os.close(memory)
        return
    if not descriptors:
        to.send(data, _FLAGS)
        return
    to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))], _FLAGS)


def receive(source: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, b"" when the other end is gone, and the descriptors that came with it."""
    data, ancillary, _, _ = source.recvmsg(_LONG, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    descriptors = list(_descriptors(ancillary)) if ancillary else []
    if data == _MEMORY:
        memory = descriptors.pop(0)
        try:
            data = os.pread(memory, os.fstat(memory).st_size, 0)
        finally:
            os.close(memory)
    return data, descriptors


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> Iterable[int]:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            yield from array.array("i", data[: len(data) // 4 * 4])
