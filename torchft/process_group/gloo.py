"""Gloo: for CPU tensors, and for CUDA tensors that are copied through host memory."""

from __future__ import annotations

from typing import Optional

import torch
from torch.distributed import ProcessGroupGloo as BaseProcessGroupGloo
from torch.distributed import Store

from torchft.process_group._gloo.connections import Connections
from torchft.process_group._gloo.operations import Operations
from torchft.process_group.base import BaseProcessGroup
from torchft.process_group.wrapper import ProcessGroupWrapper, _set_timeout


class ProcessGroupGloo(ProcessGroupWrapper):
    """A reconfigurable Gloo group. An abort cuts its connections, so that every wait gets an error.

    Args:
        timeout: default timeout of operations, and timeout of connecting to new peers.
        pg: a group to wrap, instead of creating one.
    """

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        pg = BaseProcessGroup(store, rank, world_size)
        pg._set_default_backend(BaseProcessGroup.BackendType.GLOO)
        backend = BaseProcessGroupGloo(store, rank, world_size, self._connect_timeout)
        devices = ["cpu"]
        if torch.cuda.is_available():
            devices.append("cuda")
        for device in devices:
            pg._register_backend(torch.device(device), BaseProcessGroup.BackendType.GLOO, backend)
        if self._connect_timeout != self._timeout:
            # Applies to all operations except recv, for which PyTorch always uses the connection's timeout.
            _set_timeout(pg, self._timeout)
        return pg

    def _watch(self, pg: BaseProcessGroup, store: Store, rank: int, world_size: int) -> Optional[Operations]:
        return Operations(self.getBackendName(), Connections(store, rank, world_size))

    def getBackendName(self) -> str:
        return "torchft-gloo"
