"""A process group for user code, whose allreduce goes through the Manager."""

from __future__ import annotations

from typing import TYPE_CHECKING, ContextManager, List, cast

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import AllreduceOptions

from torchft._extras import extras_of
from torchft.process_group.base import BaseProcessGroup, ProcessGroup
from torchft.process_group.dummy import ProcessGroupDummy
from torchft.process_group.wrapper import ProcessGroupWrapper

if TYPE_CHECKING:
    from torchft.manager import Manager


class ManagedProcessGroup(ProcessGroupWrapper):
    """The Manager's process group for code that only knows process groups, such as PyTorch's own DDP.

    An allreduce is the manager's: a failed one is recorded and the step not committed. The size is the
    number of participants of the step. Everything else goes to the manager's group as it is. All of it
    waits for the quorum. Before the first one this replica group is alone: PyTorch's DDP, say, compares and
    broadcasts parameters when it is made, while groups that started earlier are in the middle of a step.

    PyTorch's DDP needs `find_unused_parameters=True`: without, it broadcasts new buckets after its second
    backward pass, in which no group that started at another time takes part.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(pg=manager._pg)
        self._manager = manager
        self._extras = extras_of(manager)
        self._alone = ProcessGroupDummy(0, 1)

    @property
    def parent(self) -> BaseProcessGroup:
        """The Manager's process group; before the first quorum, one without peers."""
        return super().parent if self._extras.had_quorum else self._alone

    def _run_context(self) -> ContextManager[None]:
        self.size()  # the quorum may replace the peers
        return super()._run_context()

    def allreduce(self, tensors: List[torch.Tensor], opts: object) -> Work:
        """Reduces one tensor over the participants.

        Raises:
            ValueError: several tensors.
        """
        if len(tensors) != 1:
            raise ValueError(f"allreduce through the manager takes one tensor at a time, got {len(tensors)}")
        reduce_op = opts.reduceOp if isinstance(opts, AllreduceOptions) else opts
        self._extras.refuse_replay("a ManagedProcessGroup reduced it: what its user makes of the result is not known")
        return self._manager.allreduce(tensors[0], reduce_op=cast(ReduceOp, reduce_op))

    def size(self) -> int:
        if self._extras.adds_gradients:
            return 1  # code that divides by the size must not: a loader has weighted the losses
        try:
            return self._manager.num_participants()
        except RuntimeError:  # no quorum
            if self._extras.had_quorum:
                raise
            return 1

    def getBackendName(self) -> str:
        pg = self._manager._pg
        return pg.getBackendName() if isinstance(pg, ProcessGroup) else pg.name()
