"""Gloo: for CPU tensors, and for CUDA ones that may take the way through host memory."""

from __future__ import annotations

from datetime import timedelta
from typing import List, Optional

import torch
from torch.distributed import ProcessGroupGloo as BaseProcessGroupGloo
from torch.distributed import Store, Work
from torch.distributed.distributed_c10d import ReduceScatterOptions

from torchft.process_group._connections import Connections
from torchft.process_group.base import BaseProcessGroup
from torchft.process_group.wrapper import ProcessGroupWrapper, _set_timeout


class ProcessGroupGloo(ProcessGroupWrapper):
    """A reconfigurable Gloo group. An abort cuts its connections, so that all who wait get an error.

    Args:
        timeout: of every operation that is not given one, and of connecting with new peers.
        pg: a group to stand in front of, instead of building one.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60), pg: Optional[BaseProcessGroup] = None) -> None:
        super().__init__(timeout, pg)
        # By the id of the group they belong to: one thread may abort the old group while another has
        # already built the next.
        self._connections: dict[int, Connections] = {}

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
            # For all operations but recv, whose deadline PyTorch leaves at that of the connection.
            _set_timeout(pg, self._timeout)
        self._connections[id(pg)] = Connections(store, rank, world_size)
        return pg

    def _interrupt(self, pg: BaseProcessGroup) -> None:
        connections = self._connections.pop(id(pg), None)
        if connections is not None:
            connections.shutdown()
        pg.abort()

    def getBackendName(self) -> str:
        return "torchft-gloo"

    def reduce_scatter(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[List[torch.Tensor]],
        opts: ReduceScatterOptions,
    ) -> Work:
        """Gloo has none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter.")

    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[torch.Tensor],
        opts: ReduceScatterOptions,
    ) -> Work:
        """Gloo has none.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("ProcessGroupGloo does not support reduce_scatter_tensor_coalesced.")
