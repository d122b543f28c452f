"""Groups of torchft on the test device, as its NCCL groups are on CUDA."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Optional, TypeVar

import torch
from torch.distributed import Backend, Store, TCPStore
from torch.distributed.distributed_c10d import BarrierOptions

from tests.late import load
from torchft.process_group.accelerator import _NEVER, AcceleratorProcessGroup
from torchft.process_group.base import BaseProcessGroup, ProcessGroup

T = TypeVar("T")
G = TypeVar("G", bound=ProcessGroup)
R = TypeVar("R")

_device = load()
_CUSTOM = BaseProcessGroup.BackendType.CUSTOM


def backend(
    store: Store, rank: int, world_size: int, *, blocking: bool = False, reconfigurable: bool = False
) -> Backend:
    """A backend of torch.distributed with NCCL's rules; it reads NCCL's environment variables.

    Args:
        blocking: connecting returns when it is done; else the first operation waits for that.
        reconfigurable: the second form, which revokes instead of aborting, and gets its peers by `reconfigure`.
    """
    return _device.C.backend(store, rank, world_size, _NEVER.total_seconds(), blocking, reconfigurable)


def native_group(
    store: Store, rank: int, world_size: int, connect_timeout: Optional[timedelta] = None, **settings: bool
) -> BaseProcessGroup:
    """A group of PyTorch with such a backend on the current device."""
    # Read from the package: a replacement put there must take effect.
    from torchft import process_group

    device = torch.device("late", torch.accelerator.current_device_index())
    pg = BaseProcessGroup(store, rank, world_size)
    pg._set_default_backend(_CUSTOM)
    made = backend(store, rank, world_size, **settings)
    if not settings.get("reconfigurable"):
        with process_group.context_timeout(made.abort, connect_timeout or timedelta(minutes=1)):
            made.eager_connect_single_device(device)
    pg._register_backend(device, _CUSTOM, made)
    return pg


class ProcessGroupLate(AcceleratorProcessGroup):
    """A reconfigurable group on the current device, made as `ProcessGroupNCCL` makes NCCL's."""

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        return native_group(store, rank, world_size, self._connect_timeout)

    def _opts_hook(self, opts: T) -> T:
        opts = super()._opts_hook(opts)
        if isinstance(opts, BarrierOptions) and opts.device is None:
            # Without it PyTorch takes NCCL's barriers to the device, and those of others to the CPU.
            opts.device = torch.device("late", torch.accelerator.current_device_index())
        return opts

    def getBackendName(self) -> str:
        return "torchft-late"


def together(
    function: Callable[[int, G], R],
    world_size: int = 2,
    make: Callable[[], G] = ProcessGroupLate,  # type: ignore[assignment]
    timeout_s: float = 60.0,
) -> list[R]:
    """Calls `function(rank, group)` for all ranks of a group, each on a thread with a device of its own.

    Args:
        make: the group of a rank, not configured yet.
        timeout_s: after it, an error is raised, and the threads are left alone.

    Returns:
        What the ranks returned.

    Raises:
        Exception: the first of a rank.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            torch.accelerator.set_device_index(rank)
            group = make()
            try:
                group.configure(f"localhost:{store.port}/together", f"rank{rank}", rank, world_size)
                results[rank] = function(rank, group)
            finally:
                group.shutdown()
        except BaseException as e:
            errors.append(e)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        while thread.is_alive() and not errors and time.monotonic() < deadline:
            thread.join(0.05)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"ranks did not end within {timeout_s} s: {[t.name for t in threads if t.is_alive()]}")
    return [results[rank] for rank in range(world_size)]


def _create_backend(store: Store, rank: int, world_size: int, timeout: timedelta) -> Backend:
    return _device.C.backend(store, rank, world_size, timeout.total_seconds())


if "late" not in Backend.backend_list:
    Backend.register_backend("late", _create_backend, devices=["late"])  # for init_process_group and meshes
