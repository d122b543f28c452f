"""PyTorch's own NCCL group that can be reconfigured, as one replica group of one rank."""

from __future__ import annotations

import socket
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.gpu.device import DEVICE
from tests.integration.cluster import Cluster, Rank
from tests.unit.process_group.ranks import TIMEOUT
from torchft.process_group import native_error, supports_reconfigure

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"),
    reason="needs PyTorch >= 2.14, whose groups can be reconfigured",
)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    torch.cuda.set_device(DEVICE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://localhost:{port}",
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
        enable_reconfigure=True,
    )
    group = dist.group.WORLD
    assert group is not None
    if not supports_reconfigure(group):
        dist.destroy_process_group()
        pytest.skip("this PyTorch's NCCL cannot be reconfigured")
    yield group
    dist.destroy_process_group()


def test_a_manager_reconfigures_it(world: dist.ProcessGroup) -> None:
    def loop(rank: Rank) -> list[Any]:
        torch.cuda.set_device(DEVICE)
        manager = rank.start_manager(pg=world)
        values = []
        for step in range(4):
            manager.start_quorum()
            tensor = torch.full((4,), float(step), device=DEVICE)
            manager.allreduce(tensor).wait()
            if step == 1:
                # The next quorum has a new id, so the group is reconfigured.
                manager.report_error(RuntimeError("a step that fails"))
            values.append((tensor.tolist()[0], manager.should_commit()))
        return values

    with Cluster() as cluster:
        (future,) = cluster.start(loop, 0)
        assert future.result(90) == [(0, True), (1, False), (2, True), (3, True)]
    assert native_error(world) is None
    # PyTorch's own calls use the same object.
    tensor = torch.ones(4, device=DEVICE)
    dist.all_reduce(tensor, group=world)
    assert tensor.tolist() == [1, 1, 1, 1]
