"""Groups that fail in their worker; a separate module, because a worker imports them by name."""

from __future__ import annotations

import sys
from typing import ClassVar

from torch.distributed import ProcessGroup, Store

from torchft.process_group import ProcessGroupBabyGloo


class ProcessGroupBabyRefusing(ProcessGroupBabyGloo):
    _name: ClassVar[str] = "refusing"

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        raise MemoryError("no room for a group")


class ProcessGroupBabyReporting(ProcessGroupBabyGloo):
    """Reports the modules that the worker has loaded, in an error."""

    _name: ClassVar[str] = "telling"

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        loaded = [name for name in ("torchft._torchft", "torchft._torchft_go") if name in sys.modules]
        main = getattr(sys.modules["__main__"], "__file__", None)
        raise LookupError(f"loaded: {loaded}, main: {main}")
