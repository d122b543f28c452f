"""Groups registered with torch.distributed: dist calls, functional collectives, DeviceMesh."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import PrefixStore, ReduceOp, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from tests.unit.process_group.ranks import TIMEOUT, meeting
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)

# all_gather_tensor is the name before PyTorch 2.15.
all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor


@pytest.fixture(autouse=True)
def world(store: TCPStore) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=PrefixStore(meeting(store), store), rank=0, world_size=1, timeout=TIMEOUT
    )
    yield
    dist.destroy_process_group()


@pytest.fixture(params=["gloo", "isolated", "error_swallowing"])
def group(request: pytest.FixtureRequest, store: TCPStore) -> ProcessGroup:
    group: ProcessGroup = (ProcessGroupBabyGloo if request.param == "isolated" else ProcessGroupGloo)(
        timeout=TIMEOUT
    )
    if request.param == "error_swallowing":
        group = ErrorSwallowingProcessGroupWrapper(group)
    group.configure(meeting(store), "replica", 0, 1)
    return group


def test_dist_calls(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match="ProcessGroup name not set"):
        _ = group.group_name
    assert group.register("calls") is group
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        work = dist.all_reduce(tensor, op=ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(tensor, src=0, group=group)
        gathered = [torch.zeros(2)]
        dist.all_gather(gathered, tensor, group=group)
        joined = torch.zeros(2)
        dist.all_gather_into_tensor(joined, tensor, group=group)
        dist.barrier(group=group)
        assert gathered[0].tolist() == joined.tolist() == [1.0, 1.0]
        assert (dist.get_world_size(group), dist.get_rank(group)) == (1, 0)
    finally:
        group.unregister()


def test_functional_collectives(group: ProcessGroup) -> None:
    group.register("functional")
    try:
        total = functional.all_reduce(torch.ones(2), "sum", group)
        joined = all_gather(torch.ones(2), 0, group)
        split = functional.all_to_all_single(torch.ones(2), None, None, group)
        sent = functional.broadcast(torch.ones(2), 0, group)
        for result in (total, joined, split, sent):
            assert functional.wait_tensor(result).tolist() == [1.0, 1.0]
    finally:
        group.unregister()


def test_a_device_mesh(group: ProcessGroup) -> None:
    group.register("mesh")
    try:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("replicate",))
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=mesh.get_group("replicate"))
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        group.unregister()


def test_without_a_world(group: ProcessGroup) -> None:
    dist.destroy_process_group()
    with pytest.raises(ValueError, match="has not been initialized"):
        group.register("no world")
    # For the fixture to destroy.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def test_a_world_that_is_bound_to_a_device(group: ProcessGroup) -> None:
    """PyTorch binds NCCL's world to its device since 2.15, and connects new groups on it at once."""
    assert dist.group.WORLD is not None
    device = dist.group.WORLD.bound_device_id = torch.device("cpu", 0)
    group.register("bound")
    try:
        assert dist.group.WORLD.bound_device_id == device
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1.0, 1.0]
    finally:
        group.unregister()


def test_the_size_is_the_groups_own_number_of_ranks(store: TCPStore) -> None:
    """PyTorch's registries may report 1 rank; size() and functional collectives use the group's own
    number.
    """
    group = ProcessGroupDummy(0, 3)
    group.register("size")
    try:
        assert dist.get_world_size(group) in (1, 3)
        assert group.size() == 3
        joined = all_gather(torch.ones(2), 0, group)
        assert functional.wait_tensor(joined).tolist() == [1.0] * 6
    finally:
        group.unregister()


def test_register_once_and_again_after_unregister(store: TCPStore) -> None:
    group = ProcessGroupDummy(0, 1)
    group.register("first")
    name = group.group_name
    with pytest.raises(ValueError, match="already registered"):
        group.register("second")
    group.unregister()
    with pytest.raises(ValueError, match="name not set"):
        _ = group.group_name
    group.register("third")
    assert name and group.group_name
    group.unregister()


def test_pytorch_numbers_the_group_and_resolves_it_by_that_name() -> None:
    for pg in (ProcessGroupDummy(0, 1), ProcessGroupWrapper(pg=ProcessGroupDummy(0, 1))):
        pg.register("numbered")
        try:
            assert pg.group_name == str(dist.get_pg_count() - 1)
            assert torch._C._distributed_c10d._resolve_process_group(pg.group_name) is pg
            reduced = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", pg.group_name)
            assert functional.wait_tensor(reduced).item() == 1
        finally:
            pg.unregister()


def test_two_groups_side_by_side(store: TCPStore) -> None:
    groups = [ProcessGroupDummy(0, 1) for _ in range(2)]
    for i, group in enumerate(groups):
        group.register(f"number {i}")
    assert groups[0].group_name != groups[1].group_name
    for group in groups:
        assert functional.wait_tensor(functional.all_reduce(torch.ones(1), "sum", group)).item() == 1
        group.unregister()
