"""PyTorch's newer NCCL backend, ProcessGroupNCCL2, which `init_process_group("nccl")` uses since PyTorch 2.15.

It is created with `enable_reconfigure`: an error, a timeout or an abort then revokes the communicator, for any value of
TORCH_NCCL_ASYNC_ERROR_HANDLING. Operations in flight end, later ones are refused, and the process continues. The older
backend, which PyTorch now calls `nccl-legacy`, destroys the communicator instead.

The two backends cannot connect with each other, because each waits for a key in the store that the other never sets. So
peers announce their backend in their handles and in the store. Upstream uses the older one and announces nothing.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Generator, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from torchft._agreement import IMPLEMENTATION, differing, explained
from torchft._forked import threaded
from torchft.process_group.accelerator import _NEVER
from torchft.process_group.reconfigure import (
    LEGACY,
    NCCL2,
    Handle,
    ReconfigureOptions,
    exchange_handles,
    options_of,
)

IMPLEMENTATION_ENV = "TORCHFT_NCCL_IMPLEMENTATION"


def chosen(implementation: Optional[str]) -> str:
    """Returns the implementation that the argument selects or, if it is None, the environment; by default `LEGACY`.

    Raises:
        ValueError: there is no implementation with this name.
        RuntimeError: this PyTorch does not have it.
    """
    source = "implementation"
    if implementation is None:
        source = IMPLEMENTATION_ENV
        implementation = os.environ.get(IMPLEMENTATION_ENV) or LEGACY
    if implementation not in (LEGACY, NCCL2):
        raise ValueError(f"{source}={implementation!r}: allowed are {LEGACY!r} and {NCCL2!r}")
    if implementation == NCCL2 and not hasattr(dist, "ProcessGroupNCCL2"):
        raise RuntimeError(
            f"{source}={NCCL2!r}: PyTorch {torch.__version__} has no ProcessGroupNCCL2; builds of PyTorch 2.15 with "
            f"NCCL have it; use {LEGACY!r}"
        )
    return implementation


@contextmanager
def announced(store: Store, rank: int, world_size: int, implementation: str) -> Generator[None, None, None]:
    """Announces this rank's implementation in the store while the block connects with the peers. If they cannot connect
    because a peer has announced another implementation, the error names both.

    Raises:
        ValueError: a peer has announced another implementation.
    """
    store = PrefixStore("implementation", store)
    store.set(str(rank), implementation)

    def compare(cause: Optional[Exception] = None) -> None:
        for peer in (peer for peer in range(world_size) if peer != rank and store.check([str(peer)])):
            ours, theirs = ({IMPLEMENTATION: it} for it in (implementation, store.get(str(peer)).decode()))
            if differing(ours, theirs, IMPLEMENTATION):
                raise ValueError(explained(IMPLEMENTATION, ours, f"rank {peer}", theirs)) from cause

    # Skipped for the default, LEGACY, because the comparison takes time. A difference is found all the same: connecting
    # with peers of another implementation fails, and then `compare` explains the error.
    if implementation == NCCL2:
        compare()
    try:
        yield
    except Exception as e:
        with suppress(RuntimeError):  # the store cannot be read any more; then the original error is raised
            compare(e)
        raise


# The store of each group's backend. In C++ the backend keeps the store, but not its methods, which are Python's.
_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, Store] = weakref.WeakKeyDictionary()


class _MeetingStore(Store):
    """The store of a backend that is made before its peers are known, and with them the store in which they meet."""

    def __init__(self) -> None:
        super().__init__()
        self.there: Optional[Store] = None

    def set(self, key: str, value: str) -> None:
        self._given().set(key, value)

    def get(self, key: str) -> bytes:
        return self._given().get(key)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._given().compare_set(key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        return self._given().check(keys)

    def wait(self, keys: list[str], timeout: Optional[timedelta] = None) -> None:
        if timeout is None:
            self._given().wait(keys)
        else:
            self._given().wait(keys, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._given().multi_get(keys)

    def _given(self) -> Store:
        if self.there is None:
            raise RuntimeError("a backend without peers has no store")
        return self.there


class Prepared(NamedTuple):
    """A backend without peers, made before a quorum so that its handle travels with that.

    Attributes:
        backend: the backend.
        options: its options.
        store: its store.
        handle: its handle, for one reconfiguration.
        peers: the handles of all peers, if they have travelled.
    """

    backend: Any
    options: Any
    store: _MeetingStore
    handle: str
    peers: Optional[ReconfigureOptions] = None


def prepare(rank: int = 0, world_size: int = 1) -> Prepared:
    """Makes a backend for any peers. The caller has a device: without one PyTorch ends the process later.

    Args:
        rank, world_size: of the backend, if they are known. A reconfiguration sets them.

    Raises:
        RuntimeError: NCCL is too old.
    """
    from torch.distributed import ProcessGroupNCCL, ProcessGroupNCCL2

    opts = ProcessGroupNCCL.Options()
    opts.enable_reconfigure = True
    opts._timeout = _NEVER
    store = _MeetingStore()
    backend: Any = threaded(ProcessGroupNCCL2(store, rank, world_size, opts))
    if not backend.supports_reconfigure:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        raise RuntimeError(
            f"implementation={NCCL2!r} needs NCCL 2.28 or newer, whose communicators can be revoked; this is NCCL "
            f"{version}; use {LEGACY!r}"
        )
    return Prepared(backend, opts, store, backend.get_reconfigure_handle())


def travelled(opts: Optional[ReconfigureOptions]) -> Optional[ReconfigureOptions]:
    """The handles of the backends of all peers, which are in the handles of the groups; None if a peer announced none.

    Args:
        opts: the handles of the groups; None, or none in it: there are none.
    """
    if opts is None or not opts.handles:
        return None
    handles = [Handle.decode(handle).backend for handle in opts.handles]
    if None in handles:
        return None
    return options_of(opts.uuid, [handle for handle in handles if handle], opts.timeout)


def connect(
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
    global_ranks: Optional[list[int]],
    prepared: Optional[Prepared] = None,
) -> dist.ProcessGroup:
    """Returns a group that is connected with its peers.

    NCCL's id of the communicator, which rank 0 makes at this moment, always goes through the store: one key.

    Args:
        store: the store in which the peers meet.
        device: the current device.
        timeout: timeout of connecting. PyTorch's timeout of operations never passes; torchft has its own.
        global_ranks: the global ranks of all peers, if they are known.
        prepared: this group's backend, with the handles of all peers; None: the peers exchange handles over the store.

    Raises:
        RuntimeError: NCCL is too old, or a peer did not connect in time.
    """
    made = prepared or prepare(rank, world_size)
    if global_ranks is not None:
        made.options.global_ranks_in_group = global_ranks
    made.store.there = store
    peers = made.peers or exchange_handles(
        PrefixStore("nccl2", store), made.handle, rank, world_size, timeout, key="{}"
    )
    made.backend.reconfigure(options_of(peers.uuid, list(peers.handles), timeout)).wait()
    pg = dist.ProcessGroup(store, rank, world_size)
    pg._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    pg._register_backend(device, dist.ProcessGroup.BackendType.NCCL, made.backend)
    _stores[pg] = made.store
    return pg
