"""A test backend for one rank that follows NCCL's rules. A test controls its kernels, failures and aborts.

An allreduce simulates a peer with the same tensor, so a sum doubles the values. As in NCCL, the kernel is
queued on the backend's own stream, the future is complete at launch, only `get_error` reports a failure, and
an abort ends the kernels, with invalid outputs (here: NaN). `asyncOp=False` queues the kernel on the current
stream and returns no work.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, Optional

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.futures import Future

from tests.late import load
from torchft.process_group.accelerator import AcceleratorProcessGroup
from torchft.process_group.base import BaseProcessGroup

late = load()

# How long a kernel waits for its missing peer. The limit ends a test that calls neither `peer_comes` nor
# `abort`.
_HOST_WAITS_SEC = 20


class Kernel(dist._Work):
    """The work of a collective. Like NCCL's, it keeps references to its tensors until `wait`."""

    def __init__(self, event: torch.Event, tensors: list[torch.Tensor], future: Future[Any]) -> None:
        super().__init__()
        self._event = event
        self._stash = tensors
        self._future = future
        self.timeouts: list[Optional[timedelta]] = []

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        self.timeouts.append(timeout)
        torch.accelerator.current_stream().wait_event(self._event)
        if timeout is not None:  # with a timeout, NCCL's wait blocks the host
            self._event.synchronize()
        self._stash = []
        return True

    def get_future(self) -> Future[Any]:
        return self._future

    def is_completed(self) -> bool:
        return self._event.query()


class OneRank(dist.ProcessGroup):
    """A process group that is its own backend: `_get_backend` returns the group itself."""

    _device_types: ClassVar[list[torch.device]] = [torch.device("late")]

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.stream = torch.Stream("late")
        self.error = "SUCCESS"
        self.aborts = 0
        self.ops: list[object] = []
        self._may_run = threading.Event()
        self._may_run.set()

    # Controls for tests

    def hang(self) -> None:
        """Kernels that begin later wait for a missing peer, until `peer_comes` or an abort."""
        self._may_run.clear()

    def peer_comes(self) -> None:
        """Ends the waits of `hang`, and lets later kernels run."""
        self._may_run.set()

    def fail(self) -> None:
        """Simulates an error that the backend handles by aborting its communicator, as PyTorch's watchdog
        does.
        """
        self.error = "COMM_ERROR"
        self.abort()

    # Methods that PyTorch and torchft call

    def abort(self) -> None:
        self.aborts += 1
        self._may_run.set()

    def _get_backend(self, device: torch.device) -> OneRank:
        return self

    def get_error(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.error)

    def name(self) -> str:
        return "late"

    supports_reconfigure: ClassVar[bool] = True

    def get_reconfigure_handle(self) -> str:
        return "late"

    def reconfigure(self, opts: object) -> None: ...

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Optional[Kernel]:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        op = getattr(op, "op", op)
        self.ops.append(op)
        if not getattr(opts, "asyncOp", True):
            self._queue(tensors, op)
            return None
        # The kernel runs after the work that the caller has queued, because that work writes the inputs.
        self.stream.wait_event(torch.accelerator.current_stream().record_event())
        with self.stream:
            self._queue(tensors, op)
            event = self.stream.record_event()
            # Completed in this block: the future records an event on the current stream, and a stream that
            # waits for the future waits for that event. An event on the caller's stream would not wait for
            # the kernel.
            future: Future[Any] = Future(devices=[tensors[0].device])
            future.set_result(tensors)
        return Kernel(event, list(tensors), future)

    def _queue(self, tensors: list[torch.Tensor], op: object) -> None:
        # The multiplications read the factor when they run, so the function before them can still change it.
        factor = torch.full((1,), 1.0 if op == dist.ReduceOp.AVG else 2.0, device=tensors[0].device)
        view = late.cpu_view(factor)

        def run() -> None:
            assert self._may_run.wait(_HOST_WAITS_SEC)
            if self.aborts:
                view.fill_(float("nan"))

        late.enqueue(run)
        for tensor in tensors:
            tensor.mul_(factor)


class Group(AcceleratorProcessGroup):
    """A process group of torchft whose backend is a `OneRank`. `configure` makes a new backend.

    Attributes:
        backend: the current backend.
    """

    backend: OneRank

    def __init__(self, timeout: timedelta = timedelta(seconds=20)) -> None:
        super().__init__(timeout)
        self._pg = self.backend = OneRank()

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        self.backend = OneRank()
        return self.backend

    def getBackendName(self) -> str:
        return "torchft-late"
