"""The common part of NCCL and XCCL, whose operations run on a device, where a wait has no deadline.

`wait` only makes the current stream wait for the operation, which may still hang on the device afterwards. So
the timer thread watches the deadline: if the stream has not passed the operation by then, the group is
aborted. That ends the operation, and every later one fails until there are new peers.

An abort destroys the communicator, which may take long: it frees device memory, and NCCL itself may hang in
it. Operations end at the beginning of the abort, so no thread waits for its end.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import Any, Callable, ContextManager, Optional, TypeVar

import torch
from torch.distributed import Work

from torchft._checks import check_positive
from torchft.process_group._attempt import running
from torchft.process_group._device_memory import communicator_bytes, free_bytes, waits_for_abort
from torchft.process_group._errors import refuse_meta, tensors_of
from torchft.process_group._first_operation import AllreduceKind, RecordedAllreduces, agreed, first_operation
from torchft.process_group._timeout import given_timeout
from torchft.process_group.base import _NO_OPTIONS, BaseProcessGroup, ProcessGroup
from torchft.process_group.native import ABORT_TIMEOUT_SEC, abort_elsewhere, backend_error, native_error
from torchft.process_group.reconfigure import Handle, options_of
from torchft.process_group.wrapper import ProcessGroupWrapper
from torchft.utils import DeviceEvent, on_device, poll, refuse_capture
from torchft.work import _DummyWork, _OrderedByWait

T = TypeVar("T")

# PyTorch's own timeout of an operation, so long that torchft's deadline always passes first: at PyTorch's
# deadline its watchdog would end the process.
_NEVER = timedelta(days=7)

# The longest wait for an abort that shall free the memory of the next communicator: some seconds are plenty,
# and the peers wait meanwhile. At most half of the timeout of connecting.
_LONGEST_WAIT_FOR_MEMORY_SEC = 10.0

_logger: logging.Logger = logging.getLogger(__name__)


class _Deadline:
    """Aborts a group when called, unless it has new peers by then. All operations with the same peers have
    one, see :func:`deadline_of`. It keeps no object alive, because a timer refers to it long after the
    operation has ended.
    """

    __slots__ = ("_peers", "_pg")

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = weakref.ref(pg)
        parent = getattr(pg, "_pg", None)
        self._peers = None if parent is None else weakref.ref(parent)

    @property
    def over(self) -> bool:
        """Whether the group was aborted, or got new peers, since the operation began."""
        if self._peers is None:
            return False
        peers = self._peers()
        return peers is None or peers is not getattr(self._pg(), "_pg", None)

    def __call__(self) -> None:
        pg = self._pg()
        # A deadline that was set with the old peers must not abort operations with the new ones.
        if pg is not None and not self.over:
            pg.abort()


def deadline_of(pg: ProcessGroup) -> _Deadline:
    """The deadline of the operations of a group with its present peers."""
    known = getattr(pg, "_deadline", None)
    if not isinstance(known, _Deadline) or known._peers is None or known.over:
        known = pg._deadline = _Deadline(pg)  # type: ignore[attr-defined]
    return known


class _WorkAcceleratorTimeout(_OrderedByWait):
    """An operation on a device. After its timeout, which begins with the first wait, `pg` is aborted."""

    def __init__(self, pg: ProcessGroup, work: Work, timeout: timedelta) -> None:
        super().__init__()
        self._pg = pg
        self._work = work
        self._timeout = timeout
        self._deadline = deadline_of(pg)
        self._device: Optional[torch.device] = None  # device of the tensors; None: the current one

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        """Makes the current stream wait for the operation; the host continues. RuntimeError: the group was
        aborted, or got new peers, since the operation began.
        """
        from torchft import process_group

        if timeout is None or timeout <= timedelta(0):
            timeout = self._timeout
        self._refuse_if_over()
        # The host itself may block too, while a connection is being made.
        with process_group.context_timeout(self._deadline, timeout):
            # Not with a timeout: PyTorch's NCCL then waits on the host until the device has finished.
            if not self._work.wait():
                return False
        # PyTorch reports no error for an operation that an abort ended.
        self._refuse_if_over()
        with on_device(self._device):
            process_group.stream_timeout(self._deadline, timeout)
        return True

    def _ended(self) -> RuntimeError:
        name = self._pg.getBackendName()
        return RuntimeError(f"{name}: the operation ended with its group, which was aborted or has new peers")

    def _refuse_if_over(self) -> None:
        if self._deadline.over:
            raise self._ended()

    def get_future(self) -> torch.futures.Future[object]:
        from torchft import process_group

        fut = self._work.get_future()
        deadline, timeout, device = self._deadline, self._timeout, self._device

        def watch(done: torch.futures.Future[object]) -> None:
            # The callback runs on a stream that waits for the operation.
            with on_device(device):
                process_group.stream_timeout(deadline, timeout)

        fut.add_done_callback(watch)
        return fut

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        # PyTorch reports success for an operation that an abort ended.
        return not self._deadline.over and self._work.is_success()

    def exception(self) -> object:
        return self._ended() if self._deadline.over else self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return self._work.result()


class _OnCurrentStream(_DummyWork):
    """An operation that PyTorch queued on the current stream itself, without a work (`asyncOp=False`)."""

    def __init__(self) -> None:
        super().__init__(None)
        accelerated = torch.accelerator.is_available()
        self._mark = DeviceEvent([torch.accelerator.current_stream().device] if accelerated else [])

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        self._mark.follow()
        return True

    def is_completed(self) -> bool:
        return self._mark.reached()

    is_success = is_completed


class AcceleratorProcessGroup(ProcessGroupWrapper):
    """A group whose operations have torchft's deadlines instead of PyTorch's.

    Args:
        timeout: default timeout of operations, and timeout of connecting to new peers.
    """

    _reduces_sparse = False

    def __init__(self, timeout: timedelta = timedelta(seconds=60.0)) -> None:
        super().__init__(timeout)  # it never wraps another group
        # Replaced, never changed: another thread may abort the group meanwhile.
        self._pairs: tuple[weakref.ref[AcceleratorProcessGroup], ...] = ()
        self._recorded = RecordedAllreduces()

    def set_timeout(self, timeout: timedelta) -> None:
        # torchft's own; PyTorch's stays at _NEVER.
        check_positive("timeout", timeout)
        self._timeout = timeout

    # Pairs

    def _like(self) -> AcceleratorProcessGroup:
        """A group with the same settings, without peers."""
        return type(self)(self._timeout)

    def pair(self, peer: int, name: str, timeout: timedelta) -> AcceleratorProcessGroup:
        """Connects with one peer by a communicator of its own: operations on it do not stand before those of
        this group, whose communicator runs one after the other. An abort, or other peers, of this group end
        it as well.

        Args:
            peer: rank of the peer, which calls this, too
            name: differs from the names of earlier pairs of the two
            timeout: of connecting, if the group's is not shorter

        Returns:
            A group in which the lower rank of the two is 0; the caller shuts it down.

        Raises:
            RuntimeError: the peer could not be reached, or this group was aborted.
        """
        parent, rank = self.parent, self.rank()
        low, high = sorted((rank, peer))
        pair = self._like()
        pair.set_timeout(min(timeout, self._timeout))
        if self._options is not None:  # the peers are torchft's, and use the communicator when they connect
            pair._handed = options_of(self._options.uuid, [], self._options.timeout)
        self._pairs = (*(known for known in self._pairs if known() is not None), weakref.ref(pair))
        pair.configure(f"{self._store_addr}/pair/{low}-{high}/{name}", str(rank), int(rank == high), 2)
        if self._pg is not parent:
            pair.abort()
            raise RuntimeError(f"{self.getBackendName()} was aborted while it connected with rank {peer}")
        return pair

    def _release(self, error: Exception) -> None:
        for known in self._pairs:
            pair = known()
            if pair is not None:
                pair.abort()
        super()._release(error)

    def _interrupt(self, pg: BaseProcessGroup) -> None:
        abort = abort_elsewhere(self.getBackendName(), pg)
        self._dropping.append(abort)
        abort.wait(ABORT_TIMEOUT_SEC)

    def _make_room(self, device: torch.device, world_size: int) -> None:
        """Waits until the memory of former communicators is freed, if the next one may not fit beside them.

        An abort that has not ended in time is not waited for again: NCCL may hang in it for good.
        """
        dropping = [handed for handed in self._dropping if not handed.over]
        if not dropping or not waits_for_abort(free_bytes(device), communicator_bytes(world_size)):
            return
        began = time.monotonic()
        longest = min(self._connect_timeout.total_seconds() / 2, _LONGEST_WAIT_FOR_MEMORY_SEC)
        for handed in dropping:
            handed.wait(max(0.0, began + longest - time.monotonic()))
        if not all(handed.over for handed in dropping):
            _logger.warning(
                "%s: %s has little free memory, and the former communicator was not freed within %g s",
                self.getBackendName(),
                device,
                longest,
            )
        self._dropping = [handed for handed in self._dropping if handed not in dropping]

    def _announced(self) -> dict[str, Any]:
        return {**super()._announced(), "first": self._recorded.encode()}

    # Connecting

    def _connect(self, backend: Any, device: torch.device) -> None:
        """Connects a backend with its peers, and waits until all of them have connected.

        A non-blocking communicator is still connecting when `eager_connect_single_device` returns. The next
        call, if it is the first operation, waits for the peers and holds the lock that an abort needs: if a
        peer failed in the meantime, the training thread would wait for the whole timeout. So the first
        operations are torchft's own, on the connecting thread, for which nothing waits after an abort. This
        is done only if all peers are known to do the same. See _first_operation.py for their sizes.

        Beside other peers the operation has no elements: it waits for the communicator on the host, and
        nothing on the device waits for a peer. Otherwise a deadlock would be possible: this host waits for
        its device, the device for a peer's operation, and that peer for this host in the connection in use.

        Raises:
            TimeoutError: not all peers came in time.
        """
        attempt = running()
        count = 0 if attempt is not None and attempt.standby else 1

        def begin() -> Optional[Work]:
            backend.eager_connect_single_device(device)
            # by `configure`: upstream's peers have no handles
            return self._begin_first(backend, device, count) if self._options is not None else None

        self._wait_for_peers(backend, begin)

    def _begin_first(self, backend: Any, device: torch.device, count: int = 1) -> Work:
        return first_operation(backend, device, count, self._agreed() or () if count else ())

    def _agreed(self) -> Optional[list[AllreduceKind]]:
        """The operations for which all peers connect now; None if a peer does not say, or has no handle."""
        handles = self._options.handles if self._options is not None else []
        return agreed([Handle.decode(handle).first for handle in handles]) if handles else None

    def _use_first(self, pg: BaseProcessGroup) -> None:
        device = torch.device(pg._device_types[0].type, torch.accelerator.current_device_index())
        backend = pg._get_backend(device)
        self._wait_for_peers(backend, lambda: self._begin_first(backend, device))

    def _wait_for_peers(self, backend: Any, begin: Callable[[], Optional[Work]]) -> None:
        """Begins what peers take part in, and waits for its end, for the timeout of connecting at most."""
        # Read from the package: a replacement put there must take effect.
        from torchft import process_group

        name, timeout, attempt = self.getBackendName(), self._connect_timeout, running()
        late = threading.Event()

        def expire() -> None:
            late.set()
            abort_elsewhere(name, backend)

        if attempt is not None:
            attempt.when_abandoned(partial(abort_elsewhere, name, backend))
        with process_group.context_timeout(expire, timeout):
            work = begin()
            if work is None:
                return
            ended = poll(lambda: late.is_set() or work.is_completed(), timeout.total_seconds())
            if not (ended or late.is_set()):
                expire()
        if late.is_set():
            raise TimeoutError(
                f"{name}: timed out: not all peers connected within {timeout.total_seconds()} s"
            )
        error = backend_error(backend)
        if error is not None:
            raise error

    # Operations

    def _opts_hook(self, opts: T) -> T:
        if not hasattr(opts, "timeout"):
            return opts
        # A copy, because the caller may reuse its options, and _wrap_work reads the deadline in them.
        unlimited = type(opts)()
        for name in _fields(type(opts)):
            setattr(unlimited, name, getattr(opts, name))
        unlimited.timeout = _NEVER
        return unlimited

    def _wrap_work(self, work: Optional[Work], opts: object) -> Work:
        # Read from the package: a replacement put there must take effect.
        from torchft import process_group

        timeout = getattr(opts, "timeout", None)
        if timeout is None or timeout <= timedelta(0):
            timeout = given_timeout() or self._timeout
        if work is None:
            work = _OnCurrentStream()
        return process_group._WorkAcceleratorTimeout(self, work, timeout)

    def _run_context(self) -> ContextManager[None]:
        from torchft import process_group

        return process_group.context_timeout(deadline_of(self), given_timeout() or self._timeout)

    def _check_tensors(self, name: str, args: tuple[Any, ...]) -> None:
        pass  # `_run` has checked them

    def _run(self, name: str, *args: Any, opts: Any = _NO_OPTIONS) -> Any:
        device = check_tensors(self.getBackendName(), name, args)
        if name in ("allreduce", "allreduce_coalesced"):
            self._recorded.add(args[0], getattr(opts, "reduceOp", opts))
        # Taken before the launch: until there is a work, another thread may abort the group.
        deadline = deadline_of(self)
        with on_device(device):
            work = super()._run(name, *args, opts=opts)
        if isinstance(work, _WorkAcceleratorTimeout):
            work._deadline, work._device = deadline, device
        return work

    def errored(self) -> Optional[Exception]:
        """The error known at present, without waiting for the device. An operation's error is known after its
        end.

        PyTorch's backend handles some failures itself, by aborting its communicator: the operation then ends
        as if it had succeeded. So the backend is asked as well.
        """
        error = super().errored()
        pg = self._pg
        return error if error is not None or pg is None else native_error(pg)


@functools.cache
def _fields(options: type) -> list[str]:
    """The fields of PyTorch's options of this class, apart from the timeout."""
    return [name for name in dir(options) if not name.startswith("_") and name != "timeout"]


def check_tensors(group: str, name: str, args: tuple[Any, ...]) -> Optional[torch.device]:
    """Refuses operations that a group on a device cannot do, before any rank waits for them.

    Returns:
        The device of the tensors, None if there are none.

    Raises:
        ValueError: tensors without memory, not dense, or on several devices.
        RuntimeError: a graph is being captured.
    """
    devices = set()
    for tensor in tensors_of(args):
        if tensor.is_meta:
            refuse_meta(lambda: group, name, tensor)
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{group}: {name} of a tensor of layout {tensor.layout}: dense tensors are needed"
            )
        devices.add(tensor.device)
    if len(devices) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{group}: {name} of tensors on {where}: all of them must be on one device")
    refuse_capture(f"{group}: {name}")
    return next(iter(devices), None)
