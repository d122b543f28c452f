"""A group that builds a real one of PyTorch for each set of peers, or stands in front of another group."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Callable, ContextManager, List, Optional, TypeVar, Union

import torch
from torch.distributed import ReduceOp, Store, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceScatterOptions,
)

from torchft.process_group._reaper import reap
from torchft.process_group.base import BaseProcessGroup, ProcessGroup
from torchft.process_group.reconfigure import (
    ReconfigureOptions,
    create_store_client,
    is_native,
    supports_reconfigure,
)

T = TypeVar("T")

_logger: logging.Logger = logging.getLogger(__name__)

_NO_CONTEXT = nullcontext()


class ProcessGroupWrapper(ProcessGroup):
    """Hands every operation to its `parent`.

    Without `pg` the parent is what `_create_pg` makes for the peers of `configure`, and it is replaced
    by the next one. With `pg` that group is the parent for good, and new peers are its own affair.

    Subclasses may override `_create_pg`, `_opts_hook`, `_run_context` and `_wrap_work`.

    Args:
        timeout: of every operation that is not given one, and of connecting with new peers.
        pg: the group to stand in front of, one of torchft or a native one.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        pg: Optional[BaseProcessGroup] = None,
    ) -> None:
        super().__init__(0, 1)
        _check_timeout(timeout)
        self._timeout = timeout
        self._pg: Optional[BaseProcessGroup] = pg
        self._given: bool = pg is not None
        self._aborted: Optional[Exception] = None
        self._reconfigure_timeout: Optional[timedelta] = None
        self._quorum_id: Optional[int] = None
        self._global_ranks: Optional[list[int]] = None

    # What subclasses change

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        """Connects with the peers, who do the same, over `store`."""
        raise NotImplementedError(f"{type(self).__name__}._create_pg")

    def _opts_hook(self, opts: T) -> T:
        """The options that the parent gets instead of `opts`."""
        return opts

    def _wrap_work(self, work: Work, opts: object) -> Work:
        """What the caller gets instead of the parent's `work`."""
        return work

    def _run_context(self) -> ContextManager[None]:
        """Surrounds every call of the parent."""
        return _NO_CONTEXT

    @property
    def _connect_timeout(self) -> timedelta:
        """How long connecting with new peers may take: the group's timeout, or the caller's where that is less."""
        return min(self._timeout, self._reconfigure_timeout or self._timeout)

    def _reset(self) -> None:
        """Forgets what belonged to the old peers; called before there are new ones."""
        self._aborted = None

    def _interrupt(self, pg: BaseProcessGroup) -> None:
        """Makes the operations in flight in `pg` end, without waiting for them."""
        pg.abort()

    # Peers

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: Optional[int] = None,
        group_rank: Optional[int] = None,
        group_world_size: Optional[int] = None,
        global_ranks: Optional[list[int]] = None,
    ) -> None:
        self._reset()
        self._quorum_id = quorum_id
        self._global_ranks = global_ranks
        if self._given:
            if not isinstance(self._pg, ProcessGroup):
                raise RuntimeError(
                    f"{self.getBackendName()}: the native group behind it has no configure, only reconfigure"
                )
            self._pg.configure(
                store_addr,
                replica_id,
                rank,
                world_size,
                quorum_id=quorum_id,
                group_rank=group_rank,
                group_world_size=group_world_size,
                global_ranks=global_ranks,
            )
            return

        if not 0 <= rank < world_size:
            raise ValueError(f"configure: rank {rank} must be between 0 and world_size - 1 = {world_size - 1}")
        self._release()
        store = create_store_client(store_addr, timeout=self._connect_timeout)
        self._pg = self._create_pg(store, rank, world_size)

    @property
    def supports_reconfigure(self) -> bool:
        return not self._given or supports_reconfigure(self._pg)

    def set_rank_info(
        self,
        replica_id: str,
        group_rank: int,
        group_world_size: int,
        global_rank: Optional[int] = None,
    ) -> None:
        super().set_rank_info(replica_id, group_rank, group_world_size, global_rank)
        if isinstance(self._pg, ProcessGroup) and self._given:
            self._pg.set_rank_info(replica_id, group_rank, group_world_size, global_rank)

    def get_reconfigure_handle(self) -> str:
        if self._given:
            return self.parent.get_reconfigure_handle()
        return super().get_reconfigure_handle()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        if self._reconfigures_itself():
            self._reset()
            return self.parent.reconfigure(opts)
        self._reconfigure_timeout = opts.timeout
        try:
            return super().reconfigure(opts)
        finally:
            self._reconfigure_timeout = None

    def _reconfigures_itself(self) -> bool:
        """Whether the group behind all wrappers has its own `reconfigure`, so that nobody asks for `configure`."""
        pg = self._pg
        if not self._given or pg is None:
            return False
        if isinstance(pg, ProcessGroupWrapper) and (type(pg).reconfigure is ProcessGroupWrapper.reconfigure):
            return pg._reconfigures_itself()
        return is_native(pg) or type(pg).reconfigure is not ProcessGroup.reconfigure

    # State

    @property
    def parent(self) -> BaseProcessGroup:
        """The group that does the work."""
        pg = self._pg
        if pg is None:
            # Not an AssertionError where an abort was the reason: that is no mistake of the caller.
            if self._aborted is not None:
                raise self._aborted
            raise AssertionError("process group not initialized")
        return pg

    def size(self) -> int:
        return self.parent.size()

    def rank(self) -> int:
        return self.getRank()

    def getRank(self) -> int:
        # PyTorch asks for the rank before there are peers; PyTorch's own answer is 0 then.
        pg = self._pg
        return 0 if pg is None else pg.rank()

    def getBackendName(self) -> str:
        pg = self._pg
        if isinstance(pg, ProcessGroup):
            return f"{type(self).__name__}[{pg.getBackendName()}]"
        return type(self).__name__

    def set_timeout(self, timeout: timedelta) -> None:
        _check_timeout(timeout)
        self._timeout = timeout
        if self._pg is not None:
            _set_timeout(self._pg, timeout)

    def errored(self) -> Optional[Exception]:
        if self._given and isinstance(self._pg, ProcessGroup):
            return self._pg.errored()
        return self._aborted

    def abort(self, errored: bool = True) -> None:
        """Ends what is in flight, without waiting for it.

        Args:
            errored: whether `errored` shall tell, until there are new peers.
        """
        if self._given:
            self.parent.abort()
            return
        if errored and self._pg is not None:
            self._aborted = RuntimeError(
                f"{self.getBackendName()} was aborted and has no peers until it is configured again"
            )
        self._release()

    def shutdown(self) -> None:
        super().shutdown()
        if self._given:
            if isinstance(self._pg, ProcessGroup):
                self._pg.shutdown()
            # A native group belongs to whoever made it.
            return
        self._release()

    def _release(self) -> None:
        """Abandons the parent: others may still wait in it, the caller does not."""
        pg, self._pg = self._pg, None
        if pg is None:
            return
        try:
            self._interrupt(pg)
        except Exception:
            _logger.exception("%s: could not abort the old group", self.getBackendName())
        box: list[object] = [pg]
        del pg
        reap(box)

    # Operations

    def allgather(
        self,
        output_tensors: List[List[torch.Tensor]],
        input_tensor: List[torch.Tensor],
        opts: AllgatherOptions,
    ) -> Work:
        with self._run_context():
            return self._wrap_work(
                self.parent.allgather(output_tensors, input_tensor, self._opts_hook(opts)),
                opts,
            )

    def allgather_into_tensor_coalesced(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[torch.Tensor],
        opts: AllgatherOptions,
    ) -> Work:
        with self._run_context():
            return self._wrap_work(
                self.parent.allgather_into_tensor_coalesced(output_tensors, input_tensors, self._opts_hook(opts)),
                opts,
            )

    def allreduce(self, tensors: List[torch.Tensor], opts: object) -> Work:
        with self._run_context():
            return self._wrap_work(self.parent.allreduce(tensors, self._opts_hook(opts)), opts)

    def allreduce_coalesced(
        self,
        tensors: List[torch.Tensor],
        opts: Union[AllreduceCoalescedOptions, AllreduceOptions, ReduceOp],
    ) -> Work:
        # PyTorch takes nothing but its own options here.
        if not isinstance(opts, AllreduceCoalescedOptions):
            coalesced = AllreduceCoalescedOptions()
            if isinstance(opts, AllreduceOptions):
                coalesced.reduceOp = opts.reduceOp
                coalesced.timeout = opts.timeout
            else:
                coalesced.reduceOp = opts
            opts = coalesced
        with self._run_context():
            return self._wrap_work(self.parent.allreduce_coalesced(tensors, self._opts_hook(opts)), opts)

    def alltoall_base(
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: List[int],
        input_split_sizes: List[int],
        opts: AllToAllOptions,
    ) -> Work:
        with self._run_context():
            return self._wrap_work(
                self.parent.alltoall_base(
                    output_buffer,
                    input_buffer,
                    output_split_sizes,
                    input_split_sizes,
                    self._opts_hook(opts),
                ),
                opts,
            )

    def barrier(self, opts: Optional[BarrierOptions] = None) -> Work:
        if opts is None:
            opts = BarrierOptions()
        with self._run_context():
            return self._wrap_work(self.parent.barrier(self._opts_hook(opts)), opts)

    def broadcast(self, tensor_list: List[torch.Tensor], opts: object) -> Work:
        with self._run_context():
            return self._wrap_work(self.parent.broadcast(tensor_list, self._opts_hook(opts)), opts)

    def recv(self, tensors: List[torch.Tensor], src_rank: int, tag: int) -> Work:
        with self._run_context():
            return self._wrap_work(self.parent.recv(tensors, src_rank, tag), None)

    def reduce_scatter(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[List[torch.Tensor]],
        opts: ReduceScatterOptions,
    ) -> Work:
        with self._run_context():
            return self._wrap_work(
                self.parent.reduce_scatter(output_tensors, input_tensors, self._opts_hook(opts)),
                opts,
            )

    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[torch.Tensor],
        opts: ReduceScatterOptions,
    ) -> Work:
        with self._run_context():
            return self._wrap_work(
                self.parent.reduce_scatter_tensor_coalesced(output_tensors, input_tensors, self._opts_hook(opts)),
                opts,
            )

    def send(self, tensors: List[torch.Tensor], dst_rank: int, tag: int) -> Work:
        with self._run_context():
            return self._wrap_work(self.parent.send(tensors, dst_rank, tag), None)


def _delegate(name: str) -> Callable[..., Work]:
    """An operation that torchft adds nothing to; its arguments are PyTorch's, options last."""

    def operation(self: ProcessGroupWrapper, *args: Any) -> Work:
        opts = args[-1] if args and hasattr(args[-1], "timeout") else None
        if opts is not None:
            args = (*args[:-1], self._opts_hook(opts))
        with self._run_context():
            return self._wrap_work(getattr(self.parent, name)(*args), opts)

    operation.__name__ = name
    operation.__doc__ = f"PyTorch's `ProcessGroup.{name}`."
    return operation


# What PyTorch's own functions call besides (dist.reduce, dist.all_gather_into_tensor, ...). Which of them
# exist depends on its version.
for _name in (
    "reduce",
    "gather",
    "scatter",
    "alltoall",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "_reduce_scatter_base",
    "reduce_scatter_single",
):
    if hasattr(BaseProcessGroup, _name):
        setattr(ProcessGroupWrapper, _name, _delegate(_name))


def _set_timeout(pg: BaseProcessGroup, timeout: timedelta) -> None:
    if hasattr(pg, "set_timeout"):
        pg.set_timeout(timeout)
    else:  # PyTorch < 2.8
        for device in pg._device_types:
            pg._get_backend(device)._set_default_timeout(timeout)


def _check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout!r}: a timedelta above zero is needed")
