"""PyTorch's newer NCCL backend, ProcessGroupNCCL2, which `init_process_group("nccl")` uses since PyTorch 2.15.

It is created with `enable_reconfigure`: an error, a timeout or an abort then revokes the communicator, for any value of
TORCH_NCCL_ASYNC_ERROR_HANDLING. Operations in flight end, later ones are refused, and the process continues. The older
backend, which PyTorch now calls `nccl-legacy`, destroys the communicator instead.

The two backends cannot connect with each other, because each waits for a key in the store that the other never sets. So
peers announce their backend in their handles and in the store. Upstream uses the older one and announces nothing.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Generator, Optional

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from torchft.process_group.accelerator import _NEVER
from torchft.process_group.reconfigure import (
    LEGACY,
    NCCL2,
    describe_implementations,
    exchange_handles,
    host_store,
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
        others = [peer for peer in range(world_size) if peer != rank and store.check([str(peer)])]
        theirs = {peer: store.get(str(peer)).decode() for peer in others}
        if set(theirs.values()) - {implementation}:
            raise ValueError(describe_implementations(implementation, theirs)) from cause

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


def connect(
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: timedelta,
    global_ranks: Optional[list[int]],
) -> dist.ProcessGroup:
    """Returns a group that is connected with its peers.

    Args:
        store: the store in which the peers meet.
        device: the current device.
        timeout: timeout of connecting. PyTorch's timeout of operations never passes; torchft has its own.
        global_ranks: the global ranks of all peers, if they are known.

    Raises:
        RuntimeError: NCCL is too old, or a peer did not connect in time.
    """
    from torch.distributed import ProcessGroupNCCL, ProcessGroupNCCL2

    if world_size == 1:  # then the given store is no TCPStore, and the backend's handle must name one
        store, _ = host_store(timeout)
    opts = ProcessGroupNCCL.Options()
    opts.enable_reconfigure = True
    opts._timeout = _NEVER
    if global_ranks is not None:
        opts.global_ranks_in_group = global_ranks
    backend: Any = ProcessGroupNCCL2(store, rank, world_size, opts)
    if not backend.supports_reconfigure:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        raise RuntimeError(
            f"implementation={NCCL2!r} needs NCCL 2.28 or newer, whose communicators can be revoked; this is NCCL "
            f"{version}; use {LEGACY!r}"
        )
    handle, where = backend.get_reconfigure_handle(), PrefixStore("nccl2", store)
    backend.reconfigure(exchange_handles(where, handle, rank, world_size, timeout, key="{}")).wait()
    pg = dist.ProcessGroup(store, rank, world_size)
    pg._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    pg._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    return pg
