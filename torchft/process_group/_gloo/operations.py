"""The operations in flight among one set of peers, and an end for all of them at once.

Cutting Gloo's connections ends nearly all of its operations within a millisecond. There are exceptions: a
receive from any source; and a send that Gloo takes off its list at the moment when the connection breaks
(seen in one of a hundred failures of a peer), which sleeps until its timeout although all connections of its
rank have ended. If the connections are not known, no operation ends. So each wait here is ended separately.
After an abort, or when every connection is broken, Gloo has `_GRACE_SEC` to raise its own error; then the
wait ends. A wait for a collective also ends when one connection has been broken for `_DAMAGED_SEC`. An
operation that still runs then ends at its timeout, on a thread of the reaper. Until then it may write to its
tensors, unless its threads sleep (`quiescence`).
"""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import Future as PyFuture
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, Callable, Optional, TypeVar

import torch
from torch.distributed import Work
from torch.futures import Future

from torchft.process_group._errors import POINT_TO_POINT, copied, explained, tensors_of
from torchft.process_group._gloo.connections import GlooConnections
from torchft.process_group._gloo.quiescence import Quiescence
from torchft.utils import DeviceThread

T = TypeVar("T")

# The sum of these two is the longest wait after an abort; 100 ms are promised.
_GRACE_SEC = 0.04
_SLICE = timedelta(milliseconds=20)
_SLICE_SEC = _SLICE.total_seconds()
# The interval between two checks of the connections, which cost 1 µs each.
_LOOK_SEC = 0.1
# How long a collective may run on after a connection broke. If the peer had finished its part before it left,
# the collective can still succeed. (In a ring only the neighbors of an aborting rank wait for its data.)
_DAMAGED_SEC = 1.0
# The interval at which an aborted operation is checked for its real end.
_DRAIN_LOOK_SEC = 0.001
# Seconds for which the thread that watches futures stays idle before it ends.
_IDLE_SEC = 1.0

# The beginning of Gloo's own error after the end of a peer, which scripts look for; used if Gloo raises none.
_CLOSED = "Connection closed by peer"


class Operations:
    """The operations in flight among a set of peers. Without `connections` only `end` ends operations."""

    def __init__(self, name: str, connections: Optional[GlooConnections] = None) -> None:
        self.name = name
        self.connections = connections
        # Reentrant: the garbage collector may call `end` on a thread that holds the lock.
        self._lock = threading.RLock()
        self._ended: Optional[tuple[float, Exception]] = None
        self._looked = 0.0
        self._damaged: Optional[float] = None
        self._promises: set[_Promise] = set()

    def end(self, error: Exception) -> None:
        """Ends all operations with an error, Gloo's own or the given one. Does not wait."""
        with self._lock:
            if self._ended is None:
                self._ended = (time.monotonic(), error)
        if self.connections is not None:
            self.connections.shutdown()

    def forget(self, error: Exception) -> None:
        """In a forked child: waits end with this error. The connections belong to the parent."""
        self._lock = threading.RLock()  # a thread of the parent may have held the old one
        self._ended = (-math.inf, error)
        self.connections = None

    def over(self, collective: bool = True) -> Optional[Exception]:
        """Why no operation will end by itself any more; None: one may. A `collective` ends with any peer."""
        now = time.monotonic()
        if self._ended is None:
            self._look(now)
        ended = self._ended
        if ended is not None:
            return None if now - ended[0] < _GRACE_SEC else copied(ended[1])
        if collective and self._damaged is not None and now - self._damaged > _DAMAGED_SEC:
            return RuntimeError(f"{_CLOSED}: {self.name}: the connection with a peer is broken")
        return None

    def _look(self, now: float) -> None:
        """Records the times at which connections broke."""
        connections = self.connections
        if connections is None:
            return
        alive, all = 0, 1
        if not connections.cut:
            if now - self._looked < _LOOK_SEC:
                return
            self._looked = now
            alive, all = connections.alive()
        if alive < all and self._damaged is None:
            self._damaged = now
        if alive == 0 and all > 0:
            with self._lock:
                error = RuntimeError(f"{_CLOSED}: {self.name}: the connections with all peers are broken")
                self._ended = self._ended or (now, error)

    def guard(self, work: Work, name: str, args: tuple[Any, ...]) -> Work:
        """Wraps an operation, so that a wait for it returns after `end`."""
        return _GuardedWork(self, work, name, args)

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function that waits for peers, on a thread. Raises if the operations end before it."""
        result: PyFuture[T] = PyFuture()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as e:
                result.set_exception(e)

        DeviceThread(target=run, name="torchft_wait").start()
        while not wait([result], _SLICE_SEC).done:
            error = self.over(collective=False)
            if error is not None and not result.done():
                raise error
        return result.result()

    def promise(
        self, real: Future[Any], devices: Optional[list[torch.device]], own: Callable[[Exception], Exception]
    ) -> Future[Any]:
        """A future that ends with `real`, whose error passes through `own`, or when the operations end."""
        promise = _Promise(devices)
        with self._lock:
            self._promises.add(promise)
        _watch(self)

        def complete(done: Future[Any]) -> None:
            with self._lock:
                if promise not in self._promises:
                    return  # it has failed already
                self._promises.discard(promise)
            try:
                value = done.value()
            except Exception as e:
                promise.fail(own(e))
            else:
                promise.keep(value)

        real.add_done_callback(complete)
        return promise.future

    def fail_promises(self) -> bool:
        """Fails the futures that will not complete any more. Returns whether any are left."""
        if self._promises and (error := self.over()) is not None:
            with self._lock:
                promises, self._promises = self._promises, set()
            if promises:
                # Not on the watching thread, because completing a future runs callbacks of other code.
                DeviceThread(
                    target=lambda: [promise.fail(error) for promise in promises], name="torchft_abort"
                ).start()
        return bool(self._promises)


class _Promise:
    """A future with a result or an error, which C++ code sees too, unlike that of `set_exception`."""

    def __init__(self, devices: Optional[list[torch.device]]) -> None:
        self._error: Optional[Exception] = None
        self._trigger: Future[Any] = Future(devices=None if devices is None else [*devices])
        self.future: Future[Any] = self._trigger.then(self._outcome)

    def keep(self, value: object) -> None:
        self._trigger.set_result(value)

    def fail(self, error: Exception) -> None:
        self._error = error
        self._trigger.set_result(None)

    def _outcome(self, done: Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return done.value()


class _GuardedWork(Work):
    """An operation of Gloo for which waits end when the group's operations end."""

    def __init__(self, operations: Operations, work: Work, name: str, args: tuple[Any, ...]) -> None:
        super().__init__()
        self._operations = operations
        self._work = work
        self._name = name
        self._point_to_point = name in POINT_TO_POINT
        # Whether the operation writes only received data; known of an allreduce. Other collectives may copy
        # data to their results before their first send. If one of these is queued behind a send that was not
        # woken, it begins when that send times out, and so writes before it fails.
        self._in_place = name == "allreduce"
        self._args = args
        self._future: Optional[Future[Any]] = None

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        try:
            return self._wait(timeout)
        except RuntimeError as e:
            error = self._own(e)
            if error is e:
                raise
        raise error

    def _wait(self, timeout: Optional[timedelta]) -> bool:
        if timeout is not None and timeout <= timedelta(0):
            timeout = None
        if self._point_to_point:
            # Such operations have no future, and an expired wait breaks the connection, so they are not
            # waited for in slices.
            work = self._work
            return self._operations.call(work.wait if timeout is None else lambda: work.wait(timeout))
        deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            began = time.monotonic()
            last = deadline - began <= _SLICE_SEC
            # PyTorch truncates a deadline to whole milliseconds.
            step = timedelta(milliseconds=max(1, math.ceil(1000 * (deadline - began)))) if last else _SLICE
            try:
                return self._work.wait(step)
            except Exception:
                if self._work.is_completed():  # it may have ended just when the deadline passed
                    return self._work.wait()
                error = self._operations.over()
                if error is not None:
                    raise error from None
                if last or time.monotonic() - began < step.total_seconds() / 2:
                    raise

    def drain(self, timeout: timedelta) -> bool:
        """Waits until the operation does not write any more, also after `Operations.end`; False if it still
        may after the timeout. It may still sleep on one of Gloo's threads: see :meth:`ended`.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        connections, quiescence = self._operations.connections, Quiescence()
        while not self.ended():
            if self._in_place and connections is not None and connections.severed and quiescence.reached():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_DRAIN_LOOK_SEC)
        return True

    def ended(self) -> bool:
        """Whether Gloo has ended the operation, whose thread is free: perhaps after `Operations.end`."""
        return self._work.is_completed()

    def _own(self, error: Exception) -> Exception:
        return explained(self._operations.name, self._name, self._args, error)

    def get_future(self) -> Future[Any]:
        if self._future is None:
            kinds = sorted(
                {str(t.device) for t in tensors_of(self._args) if t.device.type not in ("cpu", "meta")}
            )
            devices = [torch.device(kind) for kind in kinds] or None
            try:
                real = self._work.get_future()
            except RuntimeError:
                # Send, recv and reduce_scatter have no future in PyTorch.
                self._future = self._waited_for(devices)
            else:
                self._future = self._operations.promise(real, devices, self._own)
        return self._future

    def _waited_for(self, devices: Optional[list[torch.device]]) -> Future[Any]:
        """Returns a future that a thread completes, with the tensors that the operation writes (or sends)."""
        promise = _Promise(devices)
        value = tensors_of(self._args[:1])

        def run() -> None:
            try:
                self.wait()
            except Exception as e:
                promise.fail(e)
            else:
                promise.keep(value)

        DeviceThread(target=run, name="torchft_wait").start()
        return promise.future

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self, timeout: Optional[timedelta] = None) -> None:
        self.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed() or self._over() is not None

    def is_success(self) -> bool:
        return self._work.is_completed() and self._work.is_success()

    def exception(self) -> Any:
        if not self._work.is_completed():
            return self._over()
        if self._work.is_success():
            return None
        error: Any = None
        try:
            error = self._work.exception()
        except TypeError:  # PyTorch 2.7 cannot convert an error to Python, but it raises it
            try:
                self._work.wait()
            except RuntimeError as e:
                error = e
        return self._own(error) if isinstance(error, Exception) else error

    def _over(self) -> Optional[Exception]:
        return self._operations.over(collective=not self._point_to_point)

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return self._work.source_rank()

    def _source_rank(self) -> int:
        return self._work._source_rank()


# The thread that completes futures for which no thread waits.

_watched: set[Operations] = set()
_changed = threading.Condition()
_watcher: Optional[threading.Thread] = None


def _forget() -> None:
    """In a forked child, which does not have the thread."""
    global _changed, _watcher
    _changed, _watcher = threading.Condition(), None
    _watched.clear()


os.register_at_fork(after_in_child=_forget)


def _watch(operations: Operations) -> None:
    global _watcher
    with _changed:
        if operations in _watched:
            return
        _watched.add(operations)
        if _watcher is None:
            _watcher = DeviceThread(target=_look_after, name="torchft_futures")
            _watcher.start()
        _changed.notify()


def _look_after() -> None:
    global _watcher
    while True:
        with _changed:
            if not _watched and not _changed.wait(_IDLE_SEC) and not _watched:
                _watcher = None
                return
            watched = list(_watched)
        time.sleep(_SLICE_SEC)
        for operations in watched:
            if not operations.fail_promises():
                with _changed:
                    # Under the lock, so that no promise is added after the thread has decided to end.
                    if not operations._promises:
                        _watched.discard(operations)
