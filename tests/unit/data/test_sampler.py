from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import Dataset

from torchft.data import DistributedSampler


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("group_rank", "num_replicas", "replica_rank", "num_replica_groups", "rank", "world_size"),
    [
        (0, 1, 0, 1, 0, 1),
        (0, 1, 1, 2, 1, 2),
        (1, 2, 0, 3, 1, 6),
        (1, 2, 2, 3, 5, 6),
        (3, 4, 1, 2, 7, 8),
    ],
)
def test_rank_and_size(
    group_rank: int, num_replicas: int, replica_rank: int, num_replica_groups: int, rank: int, world_size: int
) -> None:
    sampler = DistributedSampler(Numbers(), replica_rank, num_replica_groups, group_rank, num_replicas)
    assert (sampler.rank, sampler.num_replicas) == (rank, world_size)
    assert (sampler.global_rank, sampler.global_world_size) == (rank, world_size)


@pytest.mark.parametrize("shuffle", [False, True])
def test_all_workers_of_all_groups_see_everything_once(shuffle: bool) -> None:
    seen: list[int] = []
    for group in range(3):
        for rank in range(2):
            sampler = DistributedSampler(
                Numbers(),
                replica_rank=group,
                num_replica_groups=3,
                group_rank=rank,
                num_replicas=2,
                shuffle=shuffle,
                seed=7,
            )
            seen += list(sampler)
    assert sorted(seen) == list(range(24))


def test_the_older_names() -> None:
    older = DistributedSampler(Numbers(), replica_group=1, num_replica_groups=2, rank=0, num_replicas=2)
    assert (older.rank, older.num_replicas) == (2, 4)
    for both in ({"replica_rank": 1, "replica_group": 1}, {"replica_rank": 1, "group_rank": 0, "rank": 0}):
        with pytest.raises(TypeError, match="is the older name of"):
            DistributedSampler(Numbers(), num_replica_groups=2, num_replicas=1, **both)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("replica_rank", 2, r"replica_rank is 2: allowed are 0 to 1 \(num_replica_groups is 2\)"),
        ("replica_rank", -1, "replica_rank is -1: allowed are 0 to 1"),
        ("group_rank", 3, r"group_rank is 3: allowed are 0 to 2 \(num_replicas is 3\)"),
        ("group_rank", -1, "group_rank is -1"),
        ("num_replica_groups", 0, "num_replica_groups is 0: allowed are 1 and more"),
        ("num_replicas", -2, "num_replicas is -2: allowed are 1 and more"),
    ],
)
def test_out_of_range(setting: str, value: int, message: str) -> None:
    settings: dict[str, Any] = {
        "replica_rank": 1,
        "num_replica_groups": 2,
        "group_rank": 0,
        "num_replicas": 3,
    }
    with pytest.raises(ValueError, match=message):
        DistributedSampler(Numbers(), **{**settings, setting: value})


@pytest.mark.parametrize("missing", ["replica_rank", "num_replica_groups"])
def test_missing_arguments(missing: str) -> None:
    settings: dict[str, Any] = {
        "replica_rank": 0,
        "num_replica_groups": 1,
        "group_rank": 0,
        "num_replicas": 1,
    }
    del settings[missing]
    with pytest.raises(TypeError, match=missing):
        DistributedSampler(Numbers(), **settings)


def test_defaults_come_from_the_process_group() -> None:
    with pytest.raises(ValueError, match="group_rank is None and there is no default process group"):
        DistributedSampler(Numbers(), replica_rank=1, num_replica_groups=2)
    with pytest.raises(ValueError, match="num_replicas is None"):
        DistributedSampler(Numbers(), replica_rank=1, num_replica_groups=2, group_rank=0)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        sampler = DistributedSampler(Numbers(), replica_rank=1, num_replica_groups=2)
    finally:
        dist.destroy_process_group()
    assert (sampler.rank, sampler.num_replicas) == (1, 2)


def test_the_order_of_arguments() -> None:
    names = list(inspect.signature(DistributedSampler).parameters)
    assert names[:5] == ["dataset", "replica_rank", "num_replica_groups", "group_rank", "num_replicas"]
