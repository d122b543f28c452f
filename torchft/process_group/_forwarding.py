"""The operations of a process group that forwards them to another one."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, ContextManager, List, Optional, TypeVar

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions

from torchft.process_group._errors import explained, refuse_meta
from torchft.process_group._gloo.operations import Operations
from torchft.process_group.base import (
    _NO_OPTIONS,
    BaseProcessGroup,
    ProcessGroup,
    add_operations,
    reduction_options,
)
from torchft.process_group.checked import Checker

T = TypeVar("T")

_NO_CONTEXT = nullcontext()


class Forwarding(ProcessGroup):
    """Forwards every operation to its `parent`, which a subclass connects with peers.

    Subclasses may override `_opts_hook`, `_run_context`, `_wrap_work` and `_check_tensors`.
    """

    _timeout: timedelta  # default timeout of operations

    @property
    @abstractmethod
    def parent(self) -> BaseProcessGroup:
        """The group that does the work."""

    @abstractmethod
    def _in_flight(self) -> tuple[Optional[Operations], Optional[Checker]]:
        """Returns two objects for the operations among the parent's present peers: the one that ends their
        waits, None if the parent's abort does so; and the one that compares the calls of all ranks, None if
        they are not compared.
        """

    # Methods that subclasses override

    def _opts_hook(self, opts: T) -> T:
        """The options that the parent gets instead of `opts`."""
        return opts

    def _wrap_work(self, work: Work, opts: object) -> Work:
        """The work that the caller gets instead of the parent's `work`."""
        return work

    def _run_context(self) -> ContextManager[None]:
        """Surrounds every call of the parent."""
        return _NO_CONTEXT

    def _check_tensors(self, name: str, args: tuple[Any, ...]) -> None:
        """Refuses tensors that the parent cannot take."""
        tensors = args[0] if len(args) == 1 else None  # mostly one flat list
        if type(tensors) is not list or any(type(t) is not torch.Tensor or t.is_meta for t in tensors):
            refuse_meta(self.getBackendName, name, args)

    # Operations

    def _run(self, name: str, *args: Any, opts: Any = _NO_OPTIONS) -> Any:
        """Forwards an operation to the parent."""
        # Read before the parent, so that a reconfiguration in between ends this operation too.
        operations, checker = self._in_flight()
        with self._run_context():
            parent: Any = self.parent
            if checker is not None:
                checker.check(name, args, opts)
            self._check_tensors(name, args)
            given = args if opts is _NO_OPTIONS else (*args, self._opts_hook(opts))
            try:
                work = getattr(parent, name)(*given)
            except RuntimeError as e:
                if isinstance(parent, ProcessGroup):
                    raise
                # The error's traceback keeps this frame, and the frame must not keep the group, whose
                # destruction waits for operations.
                parent = None
                raise explained(self.getBackendName(), name, args, e) from e.__cause__
            if operations is not None:
                work = operations.guard(work, name, args)
            return self._wrap_work(work, None if opts is _NO_OPTIONS else opts)

    def allreduce_coalesced(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        # PyTorch accepts only this class of options here.
        return super().allreduce_coalesced(tensors, reduction_options(opts, AllreduceCoalescedOptions))

    def monitored_barrier(self, timeout: Optional[timedelta] = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called it; otherwise raises an error that names the missing ranks.

        Args:
            timeout: timeout of the wait; None: the group's.
            wait_all_ranks: whether rank 0 names all missing ranks, not only the first.
        """
        timeout = self._timeout if timeout is None else timeout
        operations, _ = self._in_flight()
        with self._run_context():
            parent: Any = self.parent

            def call() -> None:
                parent.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

            # monitored_barrier returns no work: the caller's thread waits.
            call() if operations is None else operations.call(call)


add_operations(
    Forwarding,
    (
        "reduce",
        "gather",
        "scatter",
        "alltoall",
        "allgather_coalesced",
        "_allgather_base",
        "all_gather_single",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "recv_anysource",
    ),
)
