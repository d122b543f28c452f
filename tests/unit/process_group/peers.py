"""The ranks of one group, and a reduction among them, for tests of all groups."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from tests.unit.process_group.backends import Backend, backends
from tests.unit.process_group.ranks import connect, on_ranks
from torchft.process_group import ProcessGroup


class Peers:
    """The ranks of one group."""

    def __init__(self, backend: Backend, store: TCPStore) -> None:
        self.backend = backend
        self.store = store
        self.n = backend.world_size
        if backend.missing is not None:
            pytest.skip(backend.missing)
        self.groups = [backend.make(store, rank) for rank in range(self.n)]

    def connect(self, groups: Sequence[ProcessGroup] | None = None) -> None:
        connect(self.groups if groups is None else groups, self.store)

    def run(self, call: Callable[[ProcessGroup, int], Any]) -> list[Any]:
        def on_device(rank: int) -> Any:
            with torch.device(self.backend.device):
                return call(self.groups[rank], rank)

        return on_ranks(self.n, on_device)

    def shutdown(self) -> None:
        for group in self.groups:
            group.shutdown()


def runs_with(fixture: str, **which: Any) -> pytest.MarkDecorator:
    """Selects the groups of a test that does not apply to all: see `backends`."""
    return pytest.mark.parametrize(fixture, backends(**which), indirect=True)


def values(rank: int, shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor that differs from rank to rank and from element to element."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) + 10 * (rank + 1)).reshape(shape).to(dtype)


def check(group: ProcessGroup, rank: int, n: int) -> None:
    """Checks that the group works with these peers."""
    assert (group.size(), group.rank()) == (n, rank)
    tensor = torch.tensor([2.0**rank])
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.item() == 2.0**n - 1
