"""Gloo: for CPU tensors, and for CUDA tensors that are copied through host memory."""

from __future__ import annotations

from datetime import timedelta
from typing import Optional

import torch
from torch.distributed import ProcessGroupGloo as BaseProcessGroupGloo
from torch.distributed import Store

from torchft.process_group._gloo.connections import GlooConnections
from torchft.process_group._gloo.operations import Operations
from torchft.process_group.base import BaseProcessGroup
from torchft.process_group.native import set_operation_timeout
from torchft.process_group.wrapper import ProcessGroupWrapper


def gloo_group(store: Store, rank: int, world_size: int, timeout: timedelta) -> BaseProcessGroup:
    """A group of PyTorch on Gloo, connected with its peers, whose operations have this timeout."""
    pg = BaseProcessGroup(store, rank, world_size)
    pg._set_default_backend(BaseProcessGroup.BackendType.GLOO)
    backend = BaseProcessGroupGloo(store, rank, world_size, timeout)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        pg._register_backend(torch.device(device), BaseProcessGroup.BackendType.GLOO, backend)
    return pg


class ProcessGroupGloo(ProcessGroupWrapper):
    """A reconfigurable Gloo group. An abort cuts its connections, so that every wait gets an error.

    Args:
        timeout: default timeout of operations, and timeout of connecting to new peers.
        pg: a group to wrap, instead of creating one.
    """

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        pg = gloo_group(store, rank, world_size, self._connect_timeout)
        if self._connect_timeout != self._timeout:
            # Applies to all operations except recv, for which PyTorch always uses the connection's timeout.
            set_operation_timeout(pg, self._timeout)
        return pg

    def _watch(self, pg: BaseProcessGroup, store: Store, rank: int, world_size: int) -> Optional[Operations]:
        return Operations(self.getBackendName(), GlooConnections(store, rank, world_size))

    def getBackendName(self) -> str:
        return "torchft-gloo"
