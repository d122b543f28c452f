"""XCCL, for Intel GPUs, in this process."""

from __future__ import annotations

import torch
from torch.distributed import Store

from torchft.process_group.accelerator import _NEVER, AcceleratorProcessGroup
from torchft.process_group.base import BaseProcessGroup


class ProcessGroupXCCL(AcceleratorProcessGroup):
    """A reconfigurable XCCL group on the current XPU device.

    Args:
        timeout: default timeout of operations, and timeout of connecting to new peers.
    """

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        # Imported here because not every build of PyTorch has it.
        from torch.distributed import ProcessGroupXCCL as BaseProcessGroupXCCL

        opts = BaseProcessGroupXCCL.Options()
        opts._timeout = _NEVER
        pg = BaseProcessGroup(store, rank, world_size)
        pg._set_default_backend(BaseProcessGroup.BackendType.XCCL)
        backend = BaseProcessGroupXCCL(store, rank, world_size, opts)
        device = torch.device("xpu", torch.xpu.current_device())
        self._connect(backend, device)
        pg._register_backend(device, BaseProcessGroup.BackendType.XCCL, backend)
        return pg

    def getBackendName(self) -> str:
        return "torchft-xccl"
