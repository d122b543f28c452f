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

    An allreduce calls `Manager.allreduce`: if it fails, the Manager keeps the error and does not commit the
    step. The size is the number of participants of the step. Other operations go to the manager's group
    unchanged. All of them wait for the quorum. Before the first quorum, and while others train on until the
    Manager's group is connected with them (`heal_along`), this group has no peers: PyTorch's DDP, for
    example, compares and broadcasts parameters when it is constructed, while groups that started earlier are
    in the middle of a step.

    PyTorch's DDP needs `find_unused_parameters=True`. Without it, DDP broadcasts new buckets after its second
    backward pass, and groups that started at another time do not take part in that broadcast.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(pg=manager._pg)
        self._manager = manager
        self._extras = extras_of(manager)
        self._alone = ProcessGroupDummy(0, 1)

    @property
    def parent(self) -> BaseProcessGroup:
        """The Manager's process group; one without peers while that has none."""
        return super().parent if self._extras.has_peers else self._alone

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
        if not self._extras.adds_gradients:
            self._extras.refuse_replay(
                "a ManagedProcessGroup reduced it: what its user makes of the result is not known"
            )
        return self._manager.allreduce(tensors[0], reduce_op=cast(ReduceOp, reduce_op))

    def size(self) -> int:
        if self._extras.adds_gradients:
            return 1  # the loader has weighted the losses, so a division by the size must have no effect
        try:
            return self._manager.num_participants()
        except RuntimeError:  # no quorum
            if self._extras.has_peers:
                raise
            return 1

    def getBackendName(self) -> str:
        pg = self._manager._pg
        return pg.getBackendName() if isinstance(pg, ProcessGroup) else pg.name()
