"""An isolated group on the simulated device. A module of its own: the worker imports it by name."""

from __future__ import annotations

from typing import ClassVar

from torch.distributed import ProcessGroup, Store

from tests.unit.process_group.isolated.simulated import LateGroup
from torchft.process_group.isolated.parent import ProcessGroupBaby


class ProcessGroupBabyLate(ProcessGroupBaby):
    """As with NCCL, an operation is over for the worker's host when it is queued."""

    _queues: ClassVar[bool] = True
    _sharing: ClassVar[dict[str, str]] = {"cpu": "tests.unit.process_group.isolated.simulated"}
    _name: ClassVar[str] = "late"

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        return LateGroup(rank, world_size)
