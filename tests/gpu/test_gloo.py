"""Gloo on CUDA tensors, several ranks on one device: plain, isolated, and behind a Manager."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions, BarrierOptions

import torchft.process_group
from tests.gpu.device import DEVICE, busy
from tests.integration.cluster import Cluster, Rank
from tests.unit.process_group.ranks import TIMEOUT, connect, on_ranks
from torchft.process_group import ManagedProcessGroup, ProcessGroup, ProcessGroupGloo

RANKS = 2


def isolated() -> ProcessGroup:
    return torchft.process_group.ProcessGroupBabyGloo(timeout=TIMEOUT)


KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "plain": lambda: ProcessGroupGloo(timeout=TIMEOUT),
    "isolated": isolated,
}


@pytest.fixture(params=KINDS)
def groups(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[list[ProcessGroup]]:
    groups = [KINDS[request.param]() for _ in range(RANKS)]
    connect(groups, store)
    yield groups
    for group in groups:
        group.shutdown()


def on_streams(call: Callable[[int], Any]) -> list[Any]:
    """Calls a function for every rank, each on a separate stream."""

    def run(rank: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            result = call(rank)
            torch.cuda.current_stream().synchronize()
            return result

    return on_ranks(RANKS, run)


def test_allreduce_is_ordered_behind_the_stream(groups: list[ProcessGroup]) -> None:
    def rank(rank: int) -> list[float]:
        tensor = torch.full((1000,), float("nan"), device=DEVICE)
        busy(0.1)
        tensor.fill_(rank + 1)
        groups[rank].allreduce([tensor], ReduceOp.SUM).wait()
        after = tensor.clone()
        tensor.fill_(0)
        return after.unique().tolist()

    assert on_streams(rank) == [[3], [3]]


def test_the_future_holds_the_tensors(groups: list[ProcessGroup]) -> None:
    def rank(rank: int) -> bool:
        tensor = torch.full((1000,), rank + 1.0, device=DEVICE)
        (result,) = groups[rank].allreduce([tensor], ReduceOp.SUM).get_future().wait()
        return result.data_ptr() == tensor.data_ptr() and bool(result.eq(3).all())

    assert on_streams(rank) == [True, True]


def test_other_collectives(groups: list[ProcessGroup]) -> None:
    def rank(rank: int) -> list[float]:
        group = groups[rank]
        tensor = torch.full((4,), rank + 1.0, device=DEVICE)
        gathered = [torch.zeros(4, device=DEVICE) for _ in range(RANKS)]
        group.allgather([gathered], [tensor], AllgatherOptions()).wait()
        group.broadcast_one(tensor, 1).wait()
        group.barrier(BarrierOptions()).wait()
        return [*(t[0].item() for t in gathered), tensor[0].item()]

    assert on_streams(rank) == [[1, 2, 2], [1, 2, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_managers_average_on_the_device(kind: str) -> None:
    def loop(rank: Rank) -> list[Any]:
        torch.cuda.set_device(DEVICE)
        manager = rank.start_manager(min_replica_size=RANKS, init_sync=False)
        managed = ManagedProcessGroup(manager)
        with torch.cuda.stream(torch.cuda.Stream()):
            manager.start_quorum()
            mine = torch.full((1000,), float(rank.group), device=DEVICE)
            total = mine.clone()
            manager.allreduce(mine).wait()
            managed.allreduce([total], ReduceOp.SUM).wait()
            assert manager.should_commit()
            return [mine.unique().tolist(), total.unique().tolist()]

    with Cluster(min_replicas=RANKS, make_pg=lambda group: KINDS[kind]()) as cluster:
        loops = [cluster.start(loop, group)[0] for group in range(RANKS)]
        results = [future.result(60) for future in loops]
    assert [result[0] for result in results] == [[0.5], [0.5]]
    assert results[0][1] == results[1][1]
