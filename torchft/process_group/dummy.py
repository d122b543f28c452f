"""A group without peers, for tests, and where PyTorch needs a group that must not communicate."""

from __future__ import annotations

from datetime import timedelta
from typing import List, Optional, Union

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceScatterOptions,
)

from torchft.process_group.base import ProcessGroup
from torchft.process_group.reconfigure import ReconfigureOptions
from torchft.work import _DummyWork


class ProcessGroupDummy(ProcessGroup):
    """Every operation succeeds without doing anything, as with a single rank, even if `size` returns more.

    Args:
        rank: value that `rank` returns.
        world: value that `size` returns.
    """

    _reduces_each_dtype = True

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._rank = rank
        self._world = world
        self.configure_count = 0
        self.reconfigure_count = 0

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
        """Counts in `configure_count`; rank and size stay those of the constructor."""
        self.configure_count += 1

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Counts in `reconfigure_count`, and in `configure_count` like every group."""
        self.reconfigure_count += 1
        return super().reconfigure(opts)

    def allgather(
        self,
        output_tensors: List[List[torch.Tensor]],
        input_tensor: List[torch.Tensor],
        opts: object,
    ) -> Work:
        for outputs, tensor in zip(output_tensors, input_tensor):
            for output in outputs:
                output.copy_(tensor)
        return _DummyWork(output_tensors)

    def allgather_into_tensor_coalesced(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[torch.Tensor],
        opts: AllgatherOptions,
    ) -> Work:
        for output, tensor in zip(output_tensors, input_tensors):
            for part in output.view(-1).split(tensor.numel()):
                part.copy_(tensor.view(-1))
        return _DummyWork(output_tensors)

    def allreduce(self, tensors: List[torch.Tensor], opts: object) -> Work:
        return _DummyWork(tensors)

    def allreduce_coalesced(
        self,
        tensors: List[torch.Tensor],
        opts: Union[AllreduceCoalescedOptions, AllreduceOptions, ReduceOp],
    ) -> Work:
        return _DummyWork(tensors)

    def alltoall_base(
        self,
        output_buffer: torch.Tensor,
        input_buffer: torch.Tensor,
        output_split_sizes: List[int],
        input_split_sizes: List[int],
        opts: AllToAllOptions,
    ) -> Work:
        output_buffer.copy_(input_buffer)
        return _DummyWork([output_buffer])

    def barrier(self, opts: Optional[BarrierOptions] = None) -> Work:
        return _DummyWork(None)

    def broadcast(self, tensor_list: List[torch.Tensor], opts: object) -> Work:
        return _DummyWork(tensor_list)

    def recv(self, tensors: List[torch.Tensor], src_rank: int, tag: int) -> Work:
        return _DummyWork(None)

    def reduce_scatter(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[List[torch.Tensor]],
        opts: object,
    ) -> Work:
        for output, tensors in zip(output_tensors, input_tensors):
            output.copy_(tensors[self._rank])
        return _DummyWork(output_tensors)

    def reduce_scatter_tensor_coalesced(
        self,
        output_tensors: List[torch.Tensor],
        input_tensors: List[torch.Tensor],
        opts: ReduceScatterOptions,
    ) -> Work:
        for output, tensor in zip(output_tensors, input_tensors):
            output.view(-1).copy_(tensor.view(-1).split(output.numel())[self._rank])
        return _DummyWork(output_tensors)

    def send(self, tensors: List[torch.Tensor], dst_rank: int, tag: int) -> Work:
        return _DummyWork(None)

    def size(self) -> int:
        return self._world

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def getBackendName(self) -> str:
        return "torchft-dummy"
