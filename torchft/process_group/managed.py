"""The group that user code sees: its allreduce goes through Manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, cast

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceOptions

from torchft.process_group.base import ProcessGroup
from torchft.process_group.wrapper import ProcessGroupWrapper

if TYPE_CHECKING:
    from torchft.manager import Manager


class ManagedProcessGroup(ProcessGroupWrapper):
    """Manager's group for code that knows only process groups, such as PyTorch's own DDP.

    An allreduce is the manager's: it waits for the quorum, a failed one is recorded and the step not
    committed. The size is the number of participants of the step. Everything else goes to the manager's
    group as it is.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(pg=manager._pg)
        self._manager = manager

    def allreduce(self, tensors: List[torch.Tensor], opts: object) -> Work:
        """Reduces one tensor over the participants.

        Raises:
            ValueError: several tensors.
        """
        if len(tensors) != 1:
            raise ValueError(f"allreduce through the manager takes one tensor at a time, got {len(tensors)}")
        reduce_op = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
        return self._manager.allreduce(tensors[0], reduce_op=cast(ReduceOp, reduce_op))

    def size(self) -> int:
        return self._manager.num_participants()

    def getBackendName(self) -> str:
        pg = self._manager._pg
        return pg.getBackendName() if isinstance(pg, ProcessGroup) else pg.name()
