"""Gives every worker of every replica group its own part of a data set."""

from __future__ import annotations

from typing import Any, Optional

import torch.distributed as dist
from torch.utils import data


class DistributedSampler(data.distributed.DistributedSampler):
    """A DistributedSampler over all workers of all replica groups.

    The number of groups is the intended number: while a group is absent, no group trains on its part of the
    data. So save the data loader's state, or set the epoch, in the same way in every group.

    Args:
        dataset: the data set
        replica_rank: number of this replica group, in [0, num_replica_groups); older name: `replica_group`
        num_replica_groups: number of replica groups of the job
        group_rank: rank of this worker in its group, in [0, num_replicas); default: its rank in the default
            process group; older name: `rank`
        num_replicas: workers in each replica group; default: size of the default process group
        **kwargs: arguments of PyTorch's DistributedSampler: `shuffle`, `seed`, `drop_last`

    Raises:
        ValueError: a rank or size is out of range, or neither given nor known from a process group
        TypeError: an argument is given under its older and its newer name
    """

    def __init__(
        self,
        dataset: data.Dataset,
        replica_rank: Optional[int] = None,
        num_replica_groups: Optional[int] = None,
        group_rank: Optional[int] = None,
        num_replicas: Optional[int] = None,
        **kwargs: Any,
    ) -> None:
        replica_rank = _renamed("replica_rank", replica_rank, "replica_group", kwargs)
        group_rank = _renamed("group_rank", group_rank, "rank", kwargs)
        if replica_rank is None or num_replica_groups is None:
            missing = "replica_rank" if replica_rank is None else "num_replica_groups"
            raise TypeError(f"DistributedSampler: missing argument {missing!r}")
        if group_rank is None:
            group_rank = _from_process_group("group_rank", dist.get_rank)
        if num_replicas is None:
            num_replicas = _from_process_group("num_replicas", dist.get_world_size)

        _check_size("num_replica_groups", num_replica_groups)
        _check_size("num_replicas", num_replicas)
        _check_rank("replica_rank", replica_rank, "num_replica_groups", num_replica_groups)
        _check_rank("group_rank", group_rank, "num_replicas", num_replicas)

        self.global_rank: int = group_rank + num_replicas * replica_rank
        self.global_world_size: int = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)


def _renamed(name: str, value: Optional[int], older: str, kwargs: dict[str, Any]) -> Optional[int]:
    if older not in kwargs:
        return value
    if value is not None:
        raise TypeError(f"DistributedSampler: {older!r} is the older name of {name!r}; give one of the two")
    return kwargs.pop(older)


def _from_process_group(name: str, ask: Any) -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(f"{name} is None and there is no default process group to take it from: give {name}")
    return ask()


def _check_size(name: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"{name} is {size}: allowed are 1 and more")


def _check_rank(name: str, rank: int, size_name: str, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"{name} is {rank}: allowed are 0 to {size - 1} ({size_name} is {size})")
