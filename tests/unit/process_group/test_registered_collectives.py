"""torch.distributed's own functions over two ranks of a registered group, synchronous and asynchronous, and
functional collectives.

For torch.distributed a registered group has one rank, because its peers change. So ranks of the group are
passed as `group_src` and `group_dst`.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import HashStore, ReduceOp, TCPStore

from tests.unit.process_group.ranks import TIMEOUT, connect, on_ranks
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)

N = 2
_names = itertools.count()

# all_gather_tensor is the name before PyTorch 2.15.
all_gather_tensor = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


class Manager:
    """The methods of a Manager that a managed group calls."""

    def __init__(self, pg: ProcessGroup) -> None:
        self._pg = pg

    def num_participants(self) -> int:
        return self._pg.size()

    def allreduce(self, tensor: torch.Tensor, reduce_op: ReduceOp) -> dist.Work:
        return self._pg.allreduce([tensor], reduce_op)


def gloo() -> ProcessGroup:
    return ProcessGroupGloo(timeout=TIMEOUT)


KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "gloo": gloo,
    "isolated": lambda: ProcessGroupBabyGloo(timeout=TIMEOUT),
    "error_swallowing": lambda: ErrorSwallowingProcessGroupWrapper(gloo()),
    "fake": lambda: FakeProcessGroupWrapper(gloo()),
    "managed": lambda: ManagedProcessGroup(Manager(gloo())),  # type: ignore[arg-type]
}


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=KINDS)
def groups(request: pytest.FixtureRequest, store: TCPStore, world: None) -> Iterator[list[ProcessGroup]]:
    made = [KINDS[request.param]() for _ in range(N)]
    connect(made, store)
    for group in made:
        group.register(f"rank {next(_names)}")
    yield made
    for group in made:
        group.unregister()


def full(value: float, n: int = 2) -> torch.Tensor:
    return torch.full((n,), value)


def all_reduce(group: ProcessGroup, rank: int, **how: Any) -> Any:
    tensor = full(rank + 1.0)
    return dist.all_reduce(tensor, group=group, **how), tensor, [3.0, 3.0]


def all_reduce_max(group: ProcessGroup, rank: int, **how: Any) -> Any:
    tensor = full(rank + 1.0)
    return dist.all_reduce(tensor, ReduceOp.MAX, group=group, **how), tensor, [2.0, 2.0]


def broadcast(group: ProcessGroup, rank: int, **how: Any) -> Any:
    tensor = full(float(rank))
    return dist.broadcast(tensor, group_src=1, group=group, **how), tensor, [1.0, 1.0]


def all_gather(group: ProcessGroup, rank: int, **how: Any) -> Any:
    parts = list(torch.zeros(N, 2).unbind())
    return dist.all_gather(parts, full(float(rank)), group=group, **how), parts, [[0.0, 0.0], [1.0, 1.0]]


def all_gather_into_tensor(group: ProcessGroup, rank: int, **how: Any) -> Any:
    joined = torch.zeros(2 * N)
    return (
        dist.all_gather_into_tensor(joined, full(float(rank)), group=group, **how),
        joined,
        [0.0, 0.0, 1.0, 1.0],
    )


def all_to_all_single(group: ProcessGroup, rank: int, **how: Any) -> Any:
    tensor = torch.zeros(2)
    work = dist.all_to_all_single(tensor, torch.tensor([10.0 * rank, 10.0 * rank + 1]), group=group, **how)
    return work, tensor, [float(rank), 10.0 + rank]


def barrier(group: ProcessGroup, rank: int, **how: Any) -> Any:
    return dist.barrier(group=group, **how), torch.zeros(1), [0.0]


def reduce(group: ProcessGroup, rank: int, **how: Any) -> Any:
    tensor = full(rank + 1.0)
    work = dist.reduce(tensor, group_dst=0, group=group, **how)
    return work, tensor[:1] if rank == 0 else torch.tensor([3.0]), [3.0]


def scatter(group: ProcessGroup, rank: int, **how: Any) -> Any:
    tensor = torch.zeros(2)
    parts = [full(5.0), full(6.0)] if rank == 1 else None
    return dist.scatter(tensor, parts, group_src=1, group=group, **how), tensor, [5.0 + rank] * 2


def gather(group: ProcessGroup, rank: int, **how: Any) -> Any:
    parts = list(torch.zeros(N, 2).unbind())
    work = dist.gather(full(float(rank)), parts if rank == 1 else None, group_dst=1, group=group, **how)
    return work, parts, [[0.0, 0.0], [1.0, 1.0] if rank == 1 else [0.0, 0.0]]


def send_and_recv(group: ProcessGroup, rank: int, **how: Any) -> Any:
    tensor = full(7.0) if rank == 0 else torch.zeros(2)
    if not how:
        dist.send(tensor, group_dst=1, group=group) if rank == 0 else dist.recv(
            tensor, group_src=0, group=group
        )
        return None, tensor, [7.0, 7.0]
    work = (
        dist.isend(tensor, group_dst=1, group=group)
        if rank == 0
        else dist.irecv(tensor, group_src=0, group=group)
    )
    return work, tensor, [7.0, 7.0]


CALLS: list[Callable[..., Any]] = [
    all_reduce,
    all_reduce_max,
    broadcast,
    all_gather,
    all_gather_into_tensor,
    all_to_all_single,
    barrier,
    reduce,
    scatter,
    gather,
    send_and_recv,
]


# Older releases take only ranks that torch.distributed knows, also as group_src and group_dst.
NAME_A_PEER = [broadcast, scatter, gather, send_and_recv]
KNOWS_PEERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)


def as_lists(result: Any) -> Any:
    return [part.tolist() for part in result] if isinstance(result, list) else result.tolist()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_dist_functions(groups: list[ProcessGroup], call: Callable[..., Any]) -> None:
    if call in NAME_A_PEER and not KNOWS_PEERS:
        pytest.skip("PyTorch 2.7 does not take the rank of a peer in a registered group")

    def on_rank(rank: int) -> None:
        for _ in range(2):
            work, result, expected = call(groups[rank], rank)
            assert work is None and as_lists(result) == expected
        works = [call(groups[rank], rank, async_op=True) for _ in range(3)]
        for work, result, expected in works:
            work.wait()
            assert as_lists(result) == expected

    on_ranks(N, on_rank)


FUNCTIONAL: dict[str, tuple[Callable[[ProcessGroup, int], torch.Tensor], Callable[[int], list[float]]]] = {
    "all_reduce": (lambda g, r: functional.all_reduce(full(r + 1.0), "sum", g), lambda r: [3.0, 3.0]),
    "broadcast": (lambda g, r: functional.broadcast(full(float(r)), 0, g), lambda r: [0.0, 0.0]),
    "all_gather_tensor": (
        lambda g, r: all_gather_tensor(full(float(r)), 0, g),
        lambda r: [0.0, 0.0, 1.0, 1.0],
    ),
    "all_to_all_single": (
        lambda g, r: functional.all_to_all_single(torch.tensor([10.0 * r, 10.0 * r + 1]), None, None, g),
        lambda r: [float(r), 10.0 + r],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives(groups: list[ProcessGroup], name: str) -> None:
    call, expected = FUNCTIONAL[name]

    def on_rank(rank: int) -> None:
        for _ in range(2):
            assert functional.wait_tensor(call(groups[rank], rank)).tolist() == expected(rank)

    on_ranks(N, on_rank)
