"""The trainer's end of one worker: sends requests, and reads the answers on one thread, the reader.

The reader alone ends operations. It pings a worker whose operation is late, and notices the worker's end.
Then it fails what is in flight, waits until the process has ended, and releases what the two shared. Threads
that wait for an operation sleep until it has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import select
import signal
import socket
import threading
import time
import weakref
from datetime import timedelta
from functools import cache, partial
from typing import Any, Callable, Optional

import torch

from torchft.futures import _TIMEOUT_MANAGER
from torchft.process_group._errors import copied
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.devices import Devices
from torchft.process_group.isolated.operation import (
    WorkerFailed,
    WorkerTimedOut,
    _FutureMetadata,
    _OpMetadata,
    timed_out,
)
from torchft.process_group.isolated.sharing import Registration
from torchft.utils import DeviceThread, poll, use_device

# A worker whose operation has passed its timeout is pinged this often, and killed if it does not answer. A
# healthy worker answers, since it reads its requests while its operations run.
_PING_EVERY_SEC = 2.0
_UNRESPONSIVE_SEC = 5.0

# The timeout of a note, or that of the longest operation: to unmap memory may have to wait for operations,
# and to begin with a device takes seconds.
_NOTE_SEC = 60.0

# If the worker seems to have ended: the longest wait until the reader has read the worker's last message.
_LAST_WORDS_SEC = 1.0

# How long an abort waits for the end of the worker, which takes some ten milliseconds.
_STOP_SEC = 0.08

# A killed worker that has not ended after this time hangs in a driver; the memory that it shares then stays
# allocated forever.
_REAP_SEC = 30.0

_logger: logging.Logger = logging.getLogger(__name__)


class Channel:
    """The trainer's end of one worker.

    Args:
        name: name of the group, for errors.
        sharing: the module for each `tensor.device.type`, see `sharing`.
        queues: whether the worker's backend may fail after its answer that an operation is queued.

    Attributes:
        theirs: the worker's end of the socket; the trainer closes it when the worker has its copy.
        devices: the memory and events that trainer and worker share.
        server: the fork server that was asked for the worker.
        broken: why the worker cannot be used any more; None if it can.
    """

    server: Any = None

    def __init__(self, name: str, sharing: dict[str, str], queues: bool = False) -> None:
        self._name = name
        self._queues = queues
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = select.poll()
        self._ready.register(self._socket, select.POLLIN)
        # The worker's process: readable when it has ended. Its first message carries this.
        self._process: Optional[int] = None
        self.devices = Devices(sharing, self._note)
        # Guards the attributes below. Reentrant: a garbage collection may call `close` on its thread.
        self._lock = threading.RLock()
        # Held while a thread uses the socket, so that the reader does not close it in the meantime.
        self._send_lock = threading.RLock()
        self._ids = itertools.count(1)
        # Operations in flight. Only the reader removes one, and ends it.
        self._ops: dict[int, _OpMetadata] = {}
        self.broken: Optional[Exception] = None
        self._longest = 0.0  # timeout of an operation, in seconds
        self._look_at = 0.0
        self._pinged_at: Optional[float] = None  # of a ping without an answer so far
        self._device: Optional[int] = None  # the reader releases memory and events of this device
        # Operations that have ended and have a future; None at the end.
        self._to_complete: queue.SimpleQueue[Optional[_OpMetadata]] = queue.SimpleQueue()
        self._completer: Optional[threading.Thread] = None
        self._reader = threading.Thread(target=self._read, name="torchft_isolated_reader", daemon=True)
        self._reader.start()
        _channels.add(self)

    # Sending

    def start(self, op: _OpMetadata) -> None:
        """Sends an operation on tensors, or raises why the worker cannot be used."""
        if self.broken is None:  # else devices may be closed
            self._longest = max(self._longest, op.timeout_sec)
            if op.stream is not None:
                self._device = op.stream.device_index
            if self.devices.queued:
                self.devices.release_reached()
            mark = None if op.sharing is None else op.sharing.mark()
            try:
                self._begin(op, protocol.RUN, op.device, mark, op.call)
                return
            except Exception:
                if op.op_id != 0:  # the reader ends it, since it may have been sent
                    raise
        op.release()
        raise self._error()

    def ask(self, kind: str, timeout: float, what: str) -> None:
        """Sends a request without tensors and waits for its answer; see `answered`."""
        self.answered(self.request(kind, timeout), what)

    def request(self, kind: str, timeout: float, *rest: Any) -> _OpMetadata:
        """Sends a request without tensors; the operation ends with its answer. `timeout`: in seconds."""
        op = _OpMetadata(timeout)
        self._begin(op, kind, *rest)
        return op

    def answered(self, op: _OpMetadata, what: str) -> None:
        """Waits for the answer of a request, which lets the worker do `what`.

        Raises:
            WorkerFailed: the worker ended before it answered.
            WorkerTimedOut: the worker did not answer in time.
            Exception: the worker's own error, or why the worker cannot be used.
        """
        if not op.wait(op.timeout_sec):
            raise WorkerTimedOut(
                f"{self._name}: the worker timed out after {op.timeout_sec:g} seconds: it did not {what}"
            )
        if op.error is not None:
            raise copied(op.error)

    def _begin(self, op: _OpMetadata, kind: str, *rest: Any, descriptor: Optional[int] = None) -> None:
        """Sends the request of an operation, which is in flight from now on."""
        # In a forked child the lock may be held for ever by a thread of the parent.
        if self.broken is None:
            with self._lock:
                if self.broken is None:
                    op.op_id = next(self._ids)
                    self._ops[op.op_id] = op
        if op.op_id == 0:
            raise self._error()
        self._send((kind, op.op_id, *rest), descriptor)

    def notify(self, kind: str, *rest: Any) -> None:
        """Sends a message that has no answer."""
        self._send((kind, *rest))

    def _note(self, device: int, note: Any, descriptor: Optional[int], held: Optional[Registration]) -> None:
        """Sends a note, see `sharing.Notify`; the operation ends when the worker has read it."""
        op = _OpMetadata(max(_NOTE_SEC, self._longest))
        op.registrations = [] if held is None else [held]
        self._begin(op, protocol.NOTE, device, note, descriptor=descriptor)

    def _send(self, request: tuple[Any, ...], descriptor: Optional[int] = None) -> None:
        """Sends a request. Waits for a worker that stalls, until the reader ends it: others always read."""
        if self.broken is None:
            try:
                with self._send_lock:
                    protocol.send(self._socket, request, () if descriptor is None else (descriptor,))
                return
            except OSError:
                self._fails_soon()
                self.close(self._worker_failed())
        raise self._error()

    # The reader

    def _read(self) -> None:
        while self.broken is None:
            try:
                if self._ready.poll(1000 * _PING_EVERY_SEC):
                    self._handle(*self._receive())
                self._look_after()
            except EOFError:
                self.close(self._worker_failed())
            except Exception as e:
                self.close(RuntimeError(f"{self._name}: the answers of the worker could not be read: {e!r}"))
        self.devices.abandon()
        with self._lock:
            ops, self._ops = self._ops, {}
        for op in ops.values():
            # Not released: the worker may still use the memory.
            op.error, op.registrations = self._error(), []
            self._end(op)
        self._to_complete.put(None)
        try:
            ended = self._has_ended()
            use_device(self._device)
            if ended:  # else it may still write into the shared memory
                self.devices.close()
            else:
                self.devices.free_streams()
        finally:
            with self._send_lock, self._lock:
                process, self._process = self._process, None
                if process is not None:
                    os.close(process)
                self._socket.close()

    def _receive(self) -> tuple[int, Any, Any]:
        answer, descriptors = protocol.receive(self._socket)
        if descriptors:
            (self._process,) = descriptors
        return answer

    def _handle(self, number: int, mark: Any, error: Any) -> None:
        if number == 0:
            self._pinged_at = None
            if error is not None:
                self.close(protocol.decode_error(error))
            return
        op = self._ops.pop(number)
        try:
            if error is not None:
                op.error = protocol.decode_error(error)
            else:
                op.mark = mark
                for registration in op.registrations:
                    registration.fetch()
        except Exception as e:
            op.error = e
        self._end(op)

    def _end(self, op: _OpMetadata) -> None:
        try:
            if op.mark is not None:
                self.devices.hold(op)
            else:
                op.release()
        except Exception as e:
            op.error = op.error or e
        with self._lock:
            op.end()
            has_future = op.future is not None
        if has_future:
            self._to_complete.put(op)

    def _look_after(self) -> None:
        """Pings the worker while an operation is late, and ends a worker that does not answer."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _PING_EVERY_SEC
        with self._lock:
            late = any(now >= op.started + op.timeout_sec + _PING_EVERY_SEC for op in self._ops.values())
        if not late:
            self._pinged_at = None
        elif self._pinged_at is not None and now >= self._pinged_at + _UNRESPONSIVE_SEC:
            self.close(RuntimeError(f"{self._name}: the worker does not respond; it is ended"))
        else:
            self._pinged_at = self._pinged_at or now
            # Pinged again each time: if another thread sends now, or the socket is full, this ping is lost.
            # If that lasts, the worker has not read for long.
            if self._send_lock.acquire(blocking=False):
                with contextlib.suppress(OSError):  # if it has ended, the next answer says so
                    protocol.send(self._socket, (protocol.PING,), flags=socket.MSG_DONTWAIT)
                self._send_lock.release()

    def _has_ended(self) -> bool:
        """Waits for the end of a worker that was killed; False if it does not end."""
        with contextlib.suppress(EOFError, OSError):  # its first message may not have been read
            while self._process is None and self._ready.poll(0):
                self._receive()
        if self._process is None:  # it has not begun: it ends when it finds the socket closed
            return True
        self.kill()
        process = select.poll()
        process.register(self._process, select.POLLIN)
        return bool(process.poll(1000 * _REAP_SEC))

    # Devices

    def follow(self, op: _OpMetadata, seconds: Optional[float] = None, began: float = 0.0) -> None:
        """Makes the current stream wait for an operation that has ended here, but perhaps not on the worker's
        device. The host waits where a stream cannot (`Sharing.follow`).

        Args:
            seconds: timeout; None: the operation's. When it has passed the worker is ended, but not if the
                host waits with a timeout of the caller.
            began: the begin of the caller's timeout for the host.

        Raises:
            Exception: the operation's error, as far as it is known now; why the worker cannot be used.
        """
        own = seconds is None
        if seconds is None:
            # NCCL knows the group's timeout only.
            seconds, began = op.timeout_sec, op.started
        if self._shared(op.follow):
            if op.timer is None and not self._reached(op):
                op.timer = _TIMEOUT_MANAGER.schedule(
                    timedelta(seconds=seconds), partial(self._expire, op, seconds)
                )
                if self._reached(op):  # it may have been released before it had the timer
                    op.end_timer()
        elif poll(lambda: self._reached(op) or self.broken is not None, began + seconds - time.monotonic()):
            # On a device, an operation that has failed ends as if it had succeeded, so the backend is asked.
            self.check(op.timeout_sec)
        else:
            error = timed_out(seconds)
            if own:
                self.close(error)
            raise error
        if self.broken is not None:
            raise self._error()

    def _reached(self, op: _OpMetadata) -> bool:
        return self._shared(op.reached)

    def _shared(self, uses: Callable[[], bool]) -> bool:
        """Uses what the worker shares. If the worker has ended, that may be gone before its end is noticed,
        so an error first waits for that, :data:`_LAST_WORDS_SEC` at most.
        """
        try:
            return uses()
        except Exception as e:
            if self._fails_soon():
                raise self._error() from e
            raise

    def _expire(self, op: _OpMetadata, seconds: float) -> None:
        # Not _reached, which may wait: all deadlines of the process share this thread.
        if not op.reached():
            self.close(timed_out(seconds))

    def check(self, timeout: float) -> None:
        """Asks the worker's backend for its error, and raises it. After the device has finished an operation,
        that includes the operation's error. `timeout`: in seconds.
        """
        if self._queues:
            self.ask(protocol.CHECK, timeout, "say whether it has failed")

    def is_over(self, op: _OpMetadata) -> bool:
        """Whether an operation has ended, also on the device; does not wait."""
        return op.done and (op.error is not None or self.broken is not None or op.reached())

    def drain(self, timeout: float) -> bool:
        """Waits until the worker's device has finished all queued work; False after `timeout` seconds."""

        def drained() -> bool:
            if self.devices.queued and self.broken is None:
                self.devices.release_reached()
            return not self.devices.queued or self.broken is not None

        return poll(drained, timeout)

    # Futures

    def get_future(
        self, op: _OpMetadata, devices: list[Any], stream: Optional[torch.Stream]
    ) -> torch.futures.Future[object]:
        """The future of an operation. A thread completes it, because its callbacks may wait for other
        operations.

        Args:
            devices: the devices of its value.
            stream: the current stream of the call; None if there are only CPU tensors. Another stream waits
                for the worker, and the future is completed on that one, so that the caller's does not wait.
        """
        with self._lock:
            if op.future is not None:
                return op.future.future
            own = None if stream is None else _own_stream(stream.device)
            op.future = metadata = _FutureMetadata(torch.futures.Future(devices=devices), own)
            ended = op.done
            if not ended and self._completer is None:
                self._completer = DeviceThread(self._complete_all, "torchft_isolated_futures")
                self._completer.start()
        if ended and op.mark is not None:
            # Where streams cannot wait for the device the host does, but not the caller.
            DeviceThread(self._complete, "torchft_isolated_futures", (op,)).start()
        elif ended:
            self._complete(op)
        return metadata.future

    def _complete_all(self) -> None:
        while (op := self._to_complete.get()) is not None:
            self._complete(op)
            del op  # it would keep the operation's tensors alive until the next one ends

    def _complete(self, op: _OpMetadata) -> None:
        """Completes the future of an operation that has ended."""
        metadata = op.future
        assert metadata is not None
        error = op.error
        try:
            with metadata.set_stream():
                if error is None and op.mark is not None:
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

    def close(self, error: Exception) -> None:
        """Kills the worker; the reader fails everything in flight. The first error counts."""
        with self._lock:
            if self.broken is not None:
                return
            self.broken = error
        self._hang_up()
        self.kill()
        # An abort returns only after the worker has ended, since until then the worker may write into shared
        # memory. With a device that can take long, and the memory is kept until then.
        if not self.devices.any and threading.current_thread() is not self._reader:
            self._reader.join(_STOP_SEC)

    def _hang_up(self) -> None:
        """Wakes the reader. Further sends fail, and a worker that has only begun ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Kills the worker's process. The reader notices that."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _fails_soon(self) -> bool:
        """Whether the reader finds the worker broken within a moment: its last message may say why."""
        return poll(lambda: self.broken is not None, _LAST_WORDS_SEC)

    def _worker_failed(self) -> Exception:
        return WorkerFailed(f"{self._name}: the worker process has ended")

    def _error(self) -> Exception:
        assert self.broken is not None
        return copied(self.broken)

    @property
    def in_flight(self) -> int:
        """The number of operations that have not ended."""
        return len(self._ops)

    def _forget(self) -> None:
        """In a forked child: the operations and the worker belong to the parent."""
        if self.broken is None:
            self.broken = RuntimeError(f"{self._name}: a forked process cannot use its parent's group")
            # Without the lock, which may be held for ever; the child has no other thread.
            ops, self._ops = self._ops, {}
            for op in ops.values():
                op.error = self._error()
                op.end()
        for end in (self._socket, self.theirs):
            end.close()
        process, self._process = self._process, None
        if process is not None:
            os.close(process)


@cache
def _own_stream(device: torch.device) -> torch.Stream:
    """The stream on which futures of tensors on a device are completed."""
    return torch.Stream(device)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _forget_all() -> None:
    for channel in list(_channels):
        channel._forget()
    _channels.clear()


os.register_at_fork(after_in_child=_forget_all)
