"""A group without peers, for tests, and where PyTorch needs a group that must not communicate."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Optional

from torch.distributed import Work

from torchft.process_group.base import NewPeers, ProcessGroup
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

    def _connect_with(self, peers: NewPeers, options: Optional[ReconfigureOptions]) -> None:
        """Counts in `configure_count`; rank and size stay those of the constructor."""
        self.configure_count += 1

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Counts in `reconfigure_count`, and in `configure_count` like every group."""
        self.reconfigure_count += 1
        return super().reconfigure(opts)

    def _run(self, name: str, *args: Any, opts: Any = None) -> Work:
        match name:
            case "allgather":
                for outputs, given in zip(*args):
                    for output in outputs:
                        output.copy_(given)
            case "allgather_into_tensor_coalesced":
                for output, given in zip(*args):
                    for part in output.view(-1).split(given.numel()):
                        part.copy_(given.view(-1))
            case "reduce_scatter":
                for output, given in zip(*args):
                    output.copy_(given[self._rank])
            case "reduce_scatter_tensor_coalesced":
                for output, given in zip(*args):
                    output.view(-1).copy_(given.view(-1).split(output.numel())[self._rank])
            case "alltoall_base":
                args[0].copy_(args[1])
                return _DummyWork([args[0]])
            case "barrier" | "send" | "recv":
                return _DummyWork(None)
        return _DummyWork(args[0])

    def size(self) -> int:
        return self._world

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def getBackendName(self) -> str:
        return "torchft-dummy"
