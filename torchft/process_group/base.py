"""The base of all groups: PyTorch's interface, and the methods that make a group fault tolerant.

The peers of a PyTorch group never change. A group of torchft gets new peers for every quorum, through
`configure` (a store to meet at) or `reconfigure` (the handles of all peers); see `reconfigure.py`.
`reconfigure` of this class calls `configure`, which a subclass may override, and that calls `_connect_with`.
"""

# Parameters have the names and the order of the published torchft, not PyTorch's.
# pyrefly: ignore-errors[bad-override, bad-override-param-name]

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any, ClassVar, Iterable, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as BaseProcessGroup
from torch.distributed import Store, TCPStore, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from torchft.process_group.reconfigure import (
    Handle,
    ReconfigureOptions,
    host_store,
    plan_rendezvous,
)
from torchft.work import _DummyWork

_HANDLE_STORE_TIMEOUT = timedelta(seconds=60)
# The options of operations that have none.
_NO_OPTIONS: Any = object()

Tensors = List[torch.Tensor]


class NewPeers(NamedTuple):
    """The arguments of `ProcessGroup.configure`."""

    store_addr: str
    replica_id: str
    rank: int
    world_size: int
    quorum_id: Optional[int]
    group_rank: Optional[int]
    group_world_size: Optional[int]
    global_ranks: Optional[list[int]]


class ProcessGroup(BaseProcessGroup):
    """A process group whose peers can change.

    Operations either return a Work or raise; where the backend is asynchronous, a peer's failure is raised by
    the wait for that Work. A subclass overrides them one by one, or implements all of them by `_run`.
    """

    # Whether it reduces tensors of each dtype: then weights are compared between the groups by default. True
    # in the groups of torchft, and so in classes derived from them.
    _reduces_each_dtype: ClassVar[bool] = False

    # Whether the backend has ReduceOp.AVG, as one pass over the tensor.
    _averages: ClassVar[bool] = False

    # Class attributes, so that a subclass may read or set them before this class is initialized.
    _group_name: Optional[str] = None
    _replica_id: str = ""
    _group_rank: Optional[int] = None
    _group_world_size: Optional[int] = None
    _global_rank: Optional[int] = None
    _handle_id: Optional[str] = None
    _handle_store: Optional[tuple[TCPStore, str]] = None
    _layout: Optional[tuple[str, str]] = None  # digest and text
    _handed: Optional[ReconfigureOptions] = None  # of a `reconfigure` in progress, for `configure`
    _reduces_sparse = True  # whether allreduce takes sparse tensors

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

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
        """Gives the group new peers; each of them calls this.

        Operations in flight with the old peers end with an error, or their results are discarded. If this
        call fails, the group has no peers until a later call succeeds.

        Args:
            store_addr: "host:port/prefix" of a TCPStore, a prefix for each call.
            replica_id: replica id of the replica group of this process.
            rank: rank of this process among the peers.
            world_size: number of peers, this one included.
            quorum_id: id of the quorum the peers belong to.
            group_rank: rank of this process inside its replica group.
            group_world_size: number of processes in a replica group.
            global_ranks: ranks of the peers in the whole job, in the order of their ranks here.
        """
        options, self._handed = self._handed, None
        arguments = (quorum_id, group_rank, group_world_size, global_ranks)
        self._connect_with(NewPeers(store_addr, replica_id, rank, world_size, *arguments), options)

    def _connect_with(self, peers: NewPeers, options: Optional[ReconfigureOptions]) -> None:
        """Does what `configure` describes. `options`: those of `reconfigure`, if it was called."""
        raise NotImplementedError(f"{type(self).__name__}.configure")

    def set_rank_info(
        self,
        replica_id: str,
        group_rank: int,
        group_world_size: int,
        global_rank: Optional[int] = None,
    ) -> None:
        """Sets the replica id and the ranks of this process. The Manager calls it before the first quorum."""
        self._replica_id = replica_id
        self._group_rank = group_rank
        self._group_world_size = group_world_size
        self._global_rank = global_rank

    @property
    def supports_reconfigure(self) -> bool:
        """True: every group of torchft can be given new peers."""
        return True

    def get_reconfigure_handle(self) -> str:
        """The handle by which peers find this group. The first call starts the store that it names."""
        if self._handle_store is None:
            self._handle_store = host_store(_HANDLE_STORE_TIMEOUT)
            if self._layout is not None:
                self.announce_layout(*self._layout)
        if self._handle_id is None:
            self._handle_id = uuid.uuid4().hex
        return Handle(
            id=self._handle_id,
            store=self._handle_store[1],
            global_rank=self._global_rank,
            spread=True,
            group_rank=self._group_rank or 0,
            **self._announced(),
        ).encode()

    def _announced(self) -> dict[str, Any]:
        """Fields of the handle that only this kind of group has."""
        return {}

    def announce_layout(self, digest: str, text: str) -> None:
        """Puts the layout of the tensors to reduce into the handle's store, for peers with another digest."""
        self._layout = digest, text
        if self._handle_store is not None:
            self._handle_store[0].set(f"layout/{digest}", text)

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Connects the group with the peers that have these handles; each of them calls this.

        Args:
            opts: `handles` in the order of the ranks; `uuid` must not have been used before with these peers.

        Raises:
            ValueError: the handles are unordered, not torchft's, or do not name this group; or a peer uses
                another implementation of NCCL.
        """
        meeting = plan_rendezvous(opts.handles, self.get_reconfigure_handle(), self._group_rank)
        peers = NewPeers(
            meeting.address(opts.uuid),
            self._replica_id,
            meeting.rank,
            meeting.world_size,
            opts.uuid,
            self._group_rank,
            self._group_world_size,
            meeting.global_ranks,
        )
        configure_group(self, peers, opts)
        return _DummyWork(None)

    # State

    def size(self) -> int:
        raise NotImplementedError(f"{type(self).__name__}.size")

    def getSize(self) -> int:
        # The name under which PyTorch's C++ code calls it.
        return self.size()

    def getBackendName(self) -> str:
        raise NotImplementedError(f"{type(self).__name__}.getBackendName")

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that have none."""
        raise NotImplementedError(f"{type(self).__name__}.set_timeout")

    def abort(self) -> None:
        """Ends operations in flight. The group cannot be used until it gets new peers."""

    def shutdown(self) -> None:
        """Releases all resources. Safe to call twice."""
        self._handle_store = None

    def share_buffer(self, tensor: torch.Tensor) -> bool:
        """Moves a buffer to memory where this group's operations need not copy it; does nothing in a group
        that never copies.

        Only for memory that belongs to the caller alone. Tensors on the same storage then use the new memory,
        but other objects that point into it, such as numpy arrays, keep the old one. May be called again for
        the same buffer.

        Args:
            tensor: any part of the buffer; all of its storage is moved.

        Returns:
            Whether the buffer was moved. False is no error: operations are then only slower.
        """
        return False

    def _peers_now(self) -> object:
        """An object that identifies the present peers, and is replaced with them."""
        return self

    def errored(self) -> Optional[Exception]:
        """The error because of which the group cannot be used any more; None if it can."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    # Registration with torch.distributed

    def register(self, name: str) -> ProcessGroup:
        """Makes the group known to torch.distributed, so that `dist` calls, functional collectives and
        DeviceMesh can use it; needs `dist.init_process_group`. To be called once, and in the same order among
        calls of `dist.new_group` in all ranks of this replica group: PyTorch numbers its groups, and
        `group_name` is the number.

        Args:
            name: unique in this process.

        Returns:
            The group to pass on: this one.
        """
        if self._group_name is not None:
            raise ValueError(f"already registered as {self._group_name!r}")
        rank = dist.get_rank()
        backend = f"{self.getBackendName()}:{name}"

        def create_pg(store: Store, rank: int, world_size: int, timeout: timedelta) -> ProcessGroup:
            return self

        dist.Backend.register_backend(backend, create_pg, devices=["cpu", "cuda", "xpu"])
        # PyTorch connects a new group at once if the world is bound to a device, as NCCL's is since PyTorch
        # 2.15. For that it asks the new group for its backend on the device, and this group has none.
        world = dist.group.WORLD
        assert world is not None
        device, world.bound_device_id = world.bound_device_id, None
        try:
            # The group is registered with one rank: its peers change, and peers in other replica groups are
            # no ranks of this process's torch.distributed.
            dist.new_group(
                ranks=[rank],
                backend=backend,
                group_desc=backend,
            )
        finally:
            world.bound_device_id = device
        return self

    def unregister(self) -> None:
        """Undoes `register`, and shuts the group down, as `dist.destroy_process_group` does."""
        dist.destroy_process_group(self)
        self._group_name = None

    def _set_group_name(self, name: str) -> None:
        # PyTorch calls this with the name under which its registries list the group.
        self._group_name = name

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed lists the group.

        Raises:
            ValueError: the group is not registered.
        """
        if self._group_name is None:
            raise ValueError("ProcessGroup name not set")
        return self._group_name

    # Operations

    def _run(self, name: str, *args: Any, opts: Any = _NO_OPTIONS) -> Any:
        """Starts an operation by its name; `opts` is `_NO_OPTIONS` for one that takes none."""
        raise NotImplementedError(f"{type(self).__name__}.{name}")

    def allgather(
        self, output_tensors: List[Tensors], input_tensor: Tensors, opts: Optional[AllgatherOptions] = None
    ) -> Work:
        """Every rank gets the tensors of all ranks, in the order of the ranks."""
        # PyTorch 2.7's dist.all_gather passes no options.
        opts = AllgatherOptions() if opts is None else opts
        return self._run("allgather", output_tensors, input_tensor, opts=opts)

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllgatherOptions
    ) -> Work:
        """Like allgather, for several tensors, each output being the concatenation of all ranks' inputs."""
        return self._run("allgather_into_tensor_coalesced", output_tensors, input_tensors, opts=opts)

    def allreduce(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        """Reduces in place; all ranks get the result.

        Args:
            tensors: a list with one tensor.
            opts: AllreduceOptions, or a ReduceOp.
        """
        return self._run("allreduce", tensors, opts=opts)

    def allreduce_coalesced(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        """Like allreduce, for several tensors at once."""
        return self._run("allreduce_coalesced", tensors, opts=opts)

    def alltoall_base(
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: List[int],
        input_split_sizes: List[int],
        opts: AllToAllOptions,
    ) -> Work:
        """Sends a slice of the input to each rank; no sizes means equal slices."""
        return self._run(
            "alltoall_base", output_buffer, input_buffer, output_split_sizes, input_split_sizes, opts=opts
        )

    def barrier(self, opts: Optional[BarrierOptions] = None) -> Work:
        """Completes when all ranks have called it."""
        return self._run("barrier", opts=BarrierOptions() if opts is None else opts)

    def broadcast(self, tensor_list: List[torch.Tensor], opts: Any) -> Work:
        """All ranks get the tensors of `opts.rootRank`."""
        return self._run("broadcast", tensor_list, opts=opts)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        """All ranks get the tensor of rank `root`."""
        opts = BroadcastOptions()
        opts.rootRank = root
        return self.broadcast([tensor], opts)

    def recv(self, tensors: List[torch.Tensor], src_rank: int, tag: int) -> Work:
        """Receives a tensor that `src_rank` sends with the same tag."""
        return self._run("recv", tensors, src_rank, tag)

    def reduce_scatter(self, output_tensors: Tensors, input_tensors: List[Tensors], opts: Any) -> Work:
        """Reduces; rank i gets the i-th result."""
        return self._run("reduce_scatter", output_tensors, input_tensors, opts=opts)

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: ReduceScatterOptions
    ) -> Work:
        """Like reduce_scatter, for several tensors, each input being the concatenation of all slices."""
        return self._run("reduce_scatter_tensor_coalesced", output_tensors, input_tensors, opts=opts)

    def send(self, tensors: List[torch.Tensor], dst_rank: int, tag: int) -> Work:
        """Sends a tensor to `dst_rank`, which receives with the same tag."""
        return self._run("send", tensors, dst_rank, tag)


def configure_group(pg: ProcessGroup, peers: NewPeers, options: Optional[ReconfigureOptions]) -> None:
    """Calls `configure`, which a subclass may override, and passes the options to `_connect_with`."""
    # As the Manager does: a subclass may have other names for the required ones.
    required = peers[:4]
    optional: dict[str, Any] = dict(zip(peers._fields[4:], peers[4:]))
    pg._handed = options
    try:
        pg.configure(*required, **optional)
    finally:
        pg._handed = None


def reduction_options(opts: Any, kind: type) -> Any:
    """Options of this class for a reduction, given a ReduceOp or options of any class that have one."""
    if isinstance(opts, kind):
        return opts
    made: Any = kind()
    made.reduceOp = getattr(opts, "reduceOp", opts)
    made.timeout = getattr(opts, "timeout", made.timeout)
    return made


def add_operations(group: type[ProcessGroup], names: Iterable[str]) -> None:
    """Gives a class that has `_run` further operations that PyTorch's functions call (dist.reduce,
    dist.all_gather_into_tensor, ...). PyTorch's version decides which of them exist.
    """

    def add(name: str) -> None:
        def operation(self: ProcessGroup, *args: Any) -> Work:
            if args and hasattr(args[-1], "timeout"):
                return self._run(name, *args[:-1], opts=args[-1])
            return self._run(name, *args)

        operation.__name__ = name
        operation.__doc__ = f"PyTorch's `ProcessGroup.{name}`; its arguments are PyTorch's, options last."
        setattr(group, name, operation)

    for name in names:
        if hasattr(BaseProcessGroup, name):
            add(name)
