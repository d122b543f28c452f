"""A group over a communicator of torchcomms, which is not part of PyTorch and must be installed.

Like a native group, a communicator stays the same object while its peers change: `comm` is the result of
`torchcomms.new_comm(..., enable_reconfigure=True)`, and its handles travel with the quorum.
"""

# pyrefly: ignore-errors[bad-override, bad-override-param-name]

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any, Callable, Iterable, List, Optional

import torch

# pyrefly: ignore[missing-import]
import torchcomms
from torch.distributed import PrefixStore, ReduceOp, Work

from torchft._checks import check_positive
from torchft._forked import Maker
from torchft.futures import context_timeout, stream_timeout
from torchft.process_group.base import NewPeers, ProcessGroup
from torchft.process_group.checked import Checker, enabled
from torchft.process_group.reconfigure import (
    ReconfigureOptions,
    check_rank,
    create_store_client,
    exchange_handles,
)
from torchft.utils import DeviceEvent, DeviceThread, on_device
from torchft.work import AnyReduceOp, _DummyWork, _PendingWork

_REDUCE_OP_MAP: dict[AnyReduceOp, object] = {
    ReduceOp.SUM: torchcomms.ReduceOp.SUM,
    ReduceOp.PRODUCT: torchcomms.ReduceOp.PRODUCT,
    ReduceOp.MIN: torchcomms.ReduceOp.MIN,
    ReduceOp.MAX: torchcomms.ReduceOp.MAX,
    ReduceOp.BAND: torchcomms.ReduceOp.BAND,
    ReduceOp.BOR: torchcomms.ReduceOp.BOR,
    ReduceOp.BXOR: torchcomms.ReduceOp.BXOR,
    ReduceOp.AVG: torchcomms.ReduceOp.AVG,
}


class ProcessGroupTorchComms(ProcessGroup):
    """Forwards every operation to a torchcomms communicator.

    After an abort, or a wait that exceeds its timeout, the group cannot be used until it is reconfigured. If
    the communicator has an `abort`, its own operations end at once, otherwise at the reconfiguration.

    Args:
        comm: a communicator that can be reconfigured. This group takes ownership: `shutdown` finalizes it.
        timeout: timeout of waiting for an operation, and of connecting to new peers.
    """

    _reduces_each_dtype = True

    def __init__(self, comm: torchcomms.TorchComm, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(0, 1)
        self._maker = Maker(type(self).__name__)
        self._comm = comm
        self._backend_name: str = comm.get_backend()
        self._device = torch.device(comm.get_device())
        self._on_cpu = self._device.type == "cpu"
        self._in_flight: weakref.WeakSet[_TorchCommsWork] = weakref.WeakSet()
        self._connected = False
        self._aborts = 0  # how often it was aborted
        self._finalized = False
        self._error: Optional[Exception] = None
        self._checker: Optional[Checker] = None
        self._lock = threading.Lock()
        self.set_timeout(timeout)

    # Peers

    def get_reconfigure_handle(self) -> str:
        return self.comm.get_init_handle()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Connects the communicator with the peers that have these handles; each of them calls this.

        Raises:
            ValueError: the handles are unordered.
            RuntimeError: the group was shut down.
        """
        if not isinstance(opts.handles, list):
            raise ValueError(
                "reconfigure handles must be a list, whose order gives the ranks, got a "
                f"{type(opts.handles).__name__}"
            )
        with self._lock:
            self._connected = False
            aborts = self._aborts
        self._end_in_flight(RuntimeError(f"{self.getBackendName()} was given other peers"))
        timeout = self._timeout if opts.timeout is None else opts.timeout
        work = self.comm.reconfigure(uuid=opts.uuid, init_handles=opts.handles, timeout=timeout)
        if work is not None:
            work.wait()
        with self._lock:
            if self._aborts != aborts:  # in the meantime, when there were no peers to abort
                raise RuntimeError(f"{self.getBackendName()} was aborted while it connected with its peers")
            self._error = None
            self._connected = True
        return _DummyWork(None)

    def _connect_with(self, peers: NewPeers, options: Optional[ReconfigureOptions]) -> None:
        """Exchanges handles with the peers over a store, and connects with them."""
        rank, world_size = peers.rank, peers.world_size
        check_rank(rank, world_size)
        store = create_store_client(peers.store_addr, timeout=self._timeout)
        where, handle = PrefixStore("torchcomms", store), self.get_reconfigure_handle()
        self.reconfigure(exchange_handles(where, handle, rank, world_size, self._timeout))
        # Only here: with `reconfigure`, the ranks have no common store to compare their calls in.
        if enabled():
            self._checker = Checker(
                self.getBackendName(), PrefixStore("check", store), rank, world_size, self._timeout
            )

    # State

    @property
    def comm(self) -> torchcomms.TorchComm:
        """The communicator.

        Raises:
            RuntimeError: the group was shut down, and its communicator finalized; or this is a forked child.
        """
        self._maker.check()
        if self._finalized:
            raise RuntimeError(f"{self.getBackendName()} was shut down")
        return self._comm

    def size(self) -> int:
        return self.comm.get_size() if self._connected else 1

    def rank(self) -> int:
        return self.getRank()

    def getRank(self) -> int:
        return self.comm.get_rank() if self._connected else 0

    def getBackendName(self) -> str:
        return f"torchcomms:{self._backend_name}"

    def set_timeout(self, timeout: timedelta) -> None:
        check_positive("timeout", timeout)
        self._timeout = timeout

    def errored(self) -> Optional[Exception]:
        return self._error

    def abort(self) -> None:
        """Ends operations in flight if the communicator can. The group then has no peers."""
        self._maker.check()
        with self._lock:
            self._aborts += 1
            if not self._connected:
                return
            error = RuntimeError(
                f"{self.getBackendName()} was aborted and has no peers until it is reconfigured"
            )
            self._error = error
            self._connected = False
        self._end_in_flight(error)
        abort = getattr(self._comm, "abort", None)
        if abort is not None:
            abort()

    def _end_in_flight(self, error: Exception) -> None:
        checker, self._checker = self._checker, None
        if checker is not None:
            checker.close(error)
        for work in list(self._in_flight):
            work.end(error)
        self._in_flight = weakref.WeakSet()

    def shutdown(self) -> None:
        self._maker.check()
        with self._lock:
            if self._finalized:
                return
            self._finalized = True
            self._connected = False
        super().shutdown()
        self._end_in_flight(RuntimeError(f"{self.getBackendName()} was shut down"))
        self._comm.finalize()

    # Operations

    def _run(self, name: str, *args: Any, opts: Any = None) -> Work:
        """Starts the operations of the communicator that implement one operation of PyTorch."""
        comm = self.comm
        error, checker = self._error, self._checker  # read once: another thread may change them
        if error is not None:
            raise error
        if not self._connected:
            raise RuntimeError(f"{self.getBackendName()} has no peers: it was not configured")
        method, calls = self._calls(name, args, opts)
        if checker is not None:
            checker.check(name, args, opts)
        works = [getattr(comm, method)(*call, async_op=True) for call in calls]
        # PyTorch's options have a negative timeout if the caller gave none.
        timeout = getattr(opts, "timeout", self._timeout)
        value = [args[0]] if name == "alltoall_base" else next(iter(args), None)
        work = _TorchCommsWork(self, works, value, timeout if timeout > timedelta(0) else self._timeout)
        self._in_flight.add(work)
        return work

    def _calls(self, name: str, args: tuple[Any, ...], opts: Any) -> tuple[str, Iterable[tuple[Any, ...]]]:
        """The communicator's method for an operation of PyTorch, and the arguments of each call of it."""
        match name:
            case "allreduce" | "allreduce_coalesced":
                op = self._op(opts)
                return "all_reduce", [(t, op) for t in args[0]]
            case "allgather":
                return "all_gather", zip(*args)
            case "allgather_into_tensor_coalesced":
                return "all_gather_single", zip(*args)
            case "broadcast":
                return "broadcast", [(t, opts.rootRank) for t in args[0]]
            case "reduce_scatter" | "reduce_scatter_tensor_coalesced":
                op = self._op(opts)
                method = "reduce_scatter" if name == "reduce_scatter" else "reduce_scatter_single"
                return method, [(*each, op) for each in zip(*args)]
            case "alltoall_base":
                output, given, output_sizes, input_sizes = args
                if not output_sizes and not input_sizes:
                    return "all_to_all_single", [(output, given)]
                n = self.size()
                outputs = output_sizes or [output.size(0) // n] * n
                inputs = input_sizes or [given.size(0) // n] * n
                return "all_to_all_v_single", [(output, given, outputs, inputs)]
            case "send" | "recv":
                return name, [(t, args[1]) for t in args[0]]
            case _:
                return "barrier", [()]

    def _op(self, opts: Any) -> object:
        """The communicator's reduction for options or a ReduceOp."""
        op = getattr(opts, "reduceOp", opts)
        # Options contain a ReduceOp object; the keys of the map are members of its enumeration.
        known = _REDUCE_OP_MAP.get(getattr(op, "op", op))
        if known is None:
            raise RuntimeError(f"{self.getBackendName()} does not support the reduction {op}")
        return known


def _deadline(pg: ProcessGroupTorchComms) -> Callable[[], None]:
    """Aborts a group when called, unless it has new peers by then. It keeps no object alive, because a timer
    refers to it long after the operation has ended.
    """
    group, peers = weakref.ref(pg), weakref.ref(pg._in_flight)

    def strike() -> None:
        pg = group()
        if pg is not None and pg._in_flight is peers():
            pg.abort()

    return strike


class _TorchCommsWork(_PendingWork):
    """Operations of a communicator whose result is `value`.

    The only method of a torchcomms work is `wait`. On a device it orders the current stream behind the
    operation. On a CPU it blocks, so a separate thread calls it; an abort can then end all other waits, even
    if the operation hangs.
    """

    def __init__(
        self, pg: ProcessGroupTorchComms, works: List[Any], value: object, timeout: timedelta
    ) -> None:
        super().__init__(value, [] if pg._on_cpu else [pg._device])
        self._pg = pg
        self._works = works
        self._timeout = timeout
        self._deadline = _deadline(pg)
        self._thread: Optional[threading.Thread] = None
        self._mark: Optional[DeviceEvent] = None  # set by a wait; reached when the device has finished

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        timeout = self._timeout if timeout is None else timeout
        if self._pg._on_cpu:
            self._wait_elsewhere()
            if not self._ended.wait(timeout.total_seconds()):
                group = self._pg.getBackendName()
                self.end(TimeoutError(f"{group}: timed out: an operation did not end within {timeout}"))
                self._pg.abort()
        elif self._error is None:
            self._wait_for_all(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_all(self, timeout: timedelta) -> None:
        try:
            with context_timeout(self._deadline, timeout):
                for work in self._works:
                    work.wait()
        except Exception as e:
            self.end(e)
        else:
            if not self._pg._on_cpu:  # on a device the stream has yet to pass the operation
                self._mark = DeviceEvent([self._pg._device])
                with on_device(self._pg._device):
                    stream_timeout(self._deadline, timeout)
            self.end(None)

    def _wait_elsewhere(self) -> None:
        with self._lock:
            if self._thread is None and not self._ended.is_set():
                self._thread = DeviceThread(
                    target=self._wait_for_all, args=(self._timeout,), name="torchft_torchcomms"
                )
                self._thread.start()

    def is_completed(self) -> bool:
        return self._ended.is_set() and (self._mark is None or self._mark.reached())

    def get_future(self) -> torch.futures.Future[object]:
        """Returns a future with the tensors, which is completed even if no thread waits for the operation."""
        first = self._future is None
        future = super().get_future()
        if first and not self._ended.is_set():
            if self._pg._on_cpu:
                self._wait_elsewhere()
            else:
                self._wait_for_all(self._timeout)
        return future
