"""The interface of a communication library for FTLib, and that of torchft's process groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from torchft.process_group import (
    ProcessGroup,
    ProcessGroupWrapper,
    reconfigure_with_store,
    supports_reconfigure,
)
from torchft.process_group.native import abort_group, errors_of


class Framework(ABC):
    """A communicator that can be rebuilt. Collectives work in place, block, and raise errors."""

    @property
    def device(self) -> torch.device:
        """The device of tensors that FTLib makes for collectives."""
        return torch.device("cpu")

    @abstractmethod
    def rebuild(self, rank: int, size: int, address: str) -> bool:
        """Connects with the peers; each of them calls this.

        Args:
            rank: rank of this member.
            size: number of members.
            address: "host:port/prefix" of a TCPStore that is known to all, with a prefix for each rebuild.

        Returns:
            Whether it succeeded; an exception is a failure too.
        """

    @abstractmethod
    def allreduce_average(self, tensors: list[torch.Tensor]) -> None:
        """Averages each tensor over all members."""

    @abstractmethod
    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all members, in the order of the ranks."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copies the tensor of rank ``root`` to all members."""

    @abstractmethod
    def abort(self) -> None:
        """Ends collectives in flight and disconnects, so that peers fail too. Any thread may call it."""

    def start_average(self, tensor: torch.Tensor) -> Optional[Work]:
        """Begins an average that may overlap with a backward pass. Returns None if it is complete already."""
        self.allreduce_average([tensor])
        return None

    def finish_average(self, work: Optional[Work]) -> None:
        """Waits for an average that ``start_average`` began."""
        if work is not None:
            work.wait()


class ProcessGroupFramework(Framework):
    """A process group of torchft, or a native one that can be reconfigured.

    Args:
        pg: the group, without peers yet. The caller shuts it down.
        timeout: timeout of connecting to new peers.
    """

    def __init__(self, pg: dist.ProcessGroup, timeout: timedelta = timedelta(seconds=60)) -> None:
        if not supports_reconfigure(pg):
            raise ValueError(
                f"framework={pg!r} is not allowed; allowed: a Framework, a process group of torchft, or a "
                "native one of PyTorch >= 2.14 made with init_process_group(..., enable_reconfigure=True)"
            )
        self._pg: Any = pg
        self._error = errors_of(pg)
        self._timeout = timeout
        self._size = 1

    @property
    def device(self) -> torch.device:
        accelerator = torch.accelerator.current_accelerator()
        needed = any(name in self._pg.getBackendName().lower() for name in ("nccl", "xccl"))
        return accelerator if needed and accelerator is not None else torch.device("cpu")

    def rebuild(self, rank: int, size: int, address: str) -> bool:
        itself = isinstance(self._pg, ProcessGroupWrapper) and self._pg._reconfigures_itself()
        if itself or not isinstance(self._pg, ProcessGroup):
            reconfigure_with_store(self._pg, address, rank, size, self._timeout)
        else:  # an abort, after a member has failed, ends this call at once
            self._pg.configure(address, f"ftlib_{rank}", rank, size)
        self._size = size
        return True

    def allreduce_average(self, tensors: list[torch.Tensor]) -> None:
        works = [self.start_average(tensor) for tensor in tensors]
        for work in works:
            self.finish_average(work)

    def start_average(self, tensor: torch.Tensor) -> Work:
        # Divided before the sum, as PyTorch's own hook does, because not every backend can average.
        tensor.div_(self._size)
        return self._pg.allreduce([tensor], AllreduceOptions())

    def finish_average(self, work: Optional[Work]) -> None:
        if work is not None:
            self._wait(work)

    def allgather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        results = [torch.empty_like(tensor) for _ in range(self._size)]
        self._wait(self._pg.allgather([results], [tensor], AllgatherOptions()))
        return results

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        opts = BroadcastOptions()
        opts.rootRank = root
        self._wait(self._pg.broadcast([tensor], opts))

    def abort(self) -> None:
        abort_group(self._pg)

    def _wait(self, work: Work) -> None:
        work.wait()
        # `wait` does not raise every error: a group on a device notices some only when the stream has
        # finished, and a group that swallows errors only returns them from `errored`.
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        error = self._error()
        if error is not None:
            raise error
