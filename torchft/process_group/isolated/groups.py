"""The isolated groups, one class per backend, which creates the group in the worker."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import torch
from torch.distributed import Store, Work

from torchft.process_group.accelerator import _NEVER
from torchft.process_group.base import _NO_OPTIONS, BaseProcessGroup
from torchft.process_group.gloo import gloo_group
from torchft.process_group.isolated.parent import ProcessGroupBaby
from torchft.process_group.nccl import WithSizes, nccl_options


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """Gloo in a worker. Gloo's own abort does not end an operation; here the worker is killed.

    Args: see `ProcessGroupBaby`.
    """

    _name: ClassVar[str] = "torchft-baby-gloo"

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        return gloo_group(store, rank, world_size, cls._worker_timeout)

    def _run(self, name: str, *args: Any, opts: Any = _NO_OPTIONS) -> Work:
        # Gloo has these operations only in versions of PyTorch whose groups can be reconfigured. Checked in
        # the trainer: the worker's error would be raised only by a wait.
        if name.startswith("reduce_scatter") and not hasattr(BaseProcessGroup, "reconfigure"):
            raise RuntimeError(f"ProcessGroupBabyGloo does not support {name}.")
        return super()._run(name, *args, opts=opts)


class ProcessGroupBabyNCCL(WithSizes, ProcessGroupBaby):
    """NCCL in a worker, on the device that is current when the group gets peers.

    Args: see `ProcessGroupBaby`.
    """

    _name: ClassVar[str] = "torchft-baby-nccl"
    _device: ClassVar[str] = "cuda"
    _averages: ClassVar[bool] = True
    _queues: ClassVar[bool] = True

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        from torch.distributed import ProcessGroupNCCL as BaseProcessGroupNCCL

        # After an error PyTorch aborts the communicator, and operations in flight end as if they had
        # succeeded. So the trainer asks for errors when its events have passed, and the worker ends as soon
        # as it has reported one. (PyTorch would end it without a report.) The variable in the trainer's
        # environment is meant for the trainer's own groups, so it is overridden here.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        os.environ.setdefault(
            "TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, int(cls._worker_timeout.total_seconds())))
        )
        opts = nccl_options(cls._worker_timeout, cls._worker_global_ranks)
        return _on_device(cls._device, BaseProcessGroupNCCL, "NCCL", store, rank, world_size, opts)


class ProcessGroupBabyXCCL(ProcessGroupBaby):
    """XCCL, for Intel GPUs, in a worker.

    PyTorch cannot share XPU memory between processes, so such tensors are refused with an error that says so.

    Args: see `ProcessGroupBaby`.
    """

    _name: ClassVar[str] = "torchft-baby-xccl"
    _device: ClassVar[str] = "xpu"
    _queues: ClassVar[bool] = True

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        from torch.distributed import ProcessGroupXCCL as BaseProcessGroupXCCL

        opts = BaseProcessGroupXCCL.Options()
        opts._timeout = _NEVER
        return _on_device(cls._device, BaseProcessGroupXCCL, "XCCL", store, rank, world_size, opts)


def _on_device(
    kind: str, backend_class: Any, name: str, store: Store, rank: int, world_size: int, opts: Any
) -> BaseProcessGroup:
    """A group with one backend on the current device, which connects at once, not in the first operation."""
    backend_type = getattr(BaseProcessGroup.BackendType, name)
    pg = BaseProcessGroup(store, rank, world_size)
    pg._set_default_backend(backend_type)
    backend = backend_class(store, rank, world_size, opts)
    device = torch.device(kind, torch.get_device_module(kind).current_device())
    backend.eager_connect_single_device(device)
    pg._register_backend(device, backend_type, backend)
    return pg
