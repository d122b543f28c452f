"""torchft's NCCL process groups on the test device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Backend, Store, TCPStore
from torch.distributed.distributed_c10d import BarrierOptions

from tests.late import load
from torchft.process_group import ProcessGroupNCCL
from torchft.process_group.accelerator import _NEVER
from torchft.process_group.base import BaseProcessGroup, ProcessGroup

T = TypeVar("T")
G = TypeVar("G", bound=ProcessGroup)
R = TypeVar("R")

_device = load()
_CUSTOM = BaseProcessGroup.BackendType.CUSTOM


def backend(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout: timedelta = _NEVER,
    blocking: bool = False,
    reconfigurable: bool = False,
) -> Backend:
    """A backend of torch.distributed with NCCL's rules; it reads NCCL's environment variables.

    Args:
        timeout: PyTorch's own timeout of an operation.
        blocking: whether creating it waits until it is connected; else the first operation waits for that.
        reconfigurable: whether it is the second form, which revokes instead of aborting and gets peers by
            `reconfigure`.
    """
    return _device.C.backend(store, rank, world_size, timeout.total_seconds(), blocking, reconfigurable)


class _Nccl:
    """Called like PyTorch's ProcessGroupNCCL, it returns this device's backend, so that torchft's
    groups create that.
    """

    @staticmethod
    def Options() -> SimpleNamespace:
        return SimpleNamespace(config=SimpleNamespace(blocking=1), _timeout=timedelta(minutes=10))

    def __call__(self, store: Store, rank: int, world_size: int, opts: SimpleNamespace) -> Backend:
        return backend(store, rank, world_size, timeout=opts._timeout, blocking=opts.config.blocking != 0)


dist.ProcessGroupNCCL = _Nccl()  # type: ignore[assignment, misc]


def native_group(store: Store, rank: int = 0, world_size: int = 1) -> BaseProcessGroup:
    """PyTorch's own group with the second form: what `init_process_group(..., enable_reconfigure=True)`
    makes.
    """
    device = torch.device("late", torch.accelerator.current_device_index())
    pg = BaseProcessGroup(store, rank, world_size)
    pg._set_default_backend(_CUSTOM)
    pg._register_backend(device, _CUSTOM, backend(store, rank, world_size, reconfigurable=True))
    return pg


class ProcessGroupLate(ProcessGroupNCCL):
    """`ProcessGroupNCCL` itself, on the current test device."""

    _device: ClassVar[str] = "late"

    def _opts_hook(self, opts: T) -> T:
        opts = super()._opts_hook(opts)
        if isinstance(opts, BarrierOptions) and opts.device is None:
            # Otherwise PyTorch would run NCCL's barriers on a GPU.
            opts.device = self._current_device()
        return opts

    def getBackendName(self) -> str:
        return super().getBackendName().replace("nccl", "late")


def together(
    function: Callable[[int, G], R],
    world_size: int = 2,
    make: Callable[[], G] = ProcessGroupLate,  # type: ignore[assignment]
    timeout_s: float = 60.0,
) -> list[R]:
    """Calls `function(rank, group)` for all ranks of a group, each on a thread with its own device.

    Args:
        make: makes the group of a rank, which is not configured yet.
        timeout_s: seconds after which an error is raised; the threads then continue.

    Returns:
        The results of the ranks.

    Raises:
        Exception: the first error of a rank.
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
        threading.Thread(target=run, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world_size)
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
        raise TimeoutError(
            f"ranks did not end within {timeout_s} s: {[t.name for t in threads if t.is_alive()]}"
        )
    return [results[rank] for rank in range(world_size)]


def _create_backend(store: Store, rank: int, world_size: int, timeout: timedelta) -> Backend:
    return _device.C.backend(store, rank, world_size, timeout.total_seconds())


if "late" not in Backend.backend_list:
    Backend.register_backend("late", _create_backend, devices=["late"])  # for init_process_group and meshes
