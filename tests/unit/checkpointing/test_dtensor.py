"""DTensors: the local part travels, with what is needed to make a DTensor of it again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist

from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def sharded(mesh: Any, value: float) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.full((4, 3), value), mesh, [Shard(0)])


def check(got: Any, want: Any) -> None:
    assert type(got) is type(want)
    assert got.placements == want.placements and got.shape == want.shape
    assert torch.equal(got.to_local(), want.to_local())
    assert got.device_mesh.mesh_dim_names == want.device_mesh.mesh_dim_names
    assert torch.equal((got + 1).to_local(), want.to_local() + 1)  # it is one to compute with


@pytest.mark.parametrize("num_chunks", [0, 2])
def test_over_http(mesh: Any, num_chunks: int) -> None:
    source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks)
    want = sharded(mesh, 2.0)
    source.send_checkpoint([1], 1, {"w": want, "b": torch.ones(2)}, TIMEOUT)
    try:
        got = source.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    finally:
        source.shutdown()
    check(got["w"], want)


@pytest.mark.parametrize("in_place", [False, True])
def test_over_a_process_group(mesh: Any, in_place: bool) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def group(rank: int) -> Any:
        return dist.ProcessGroupGloo(dist.TCPStore("localhost", store.port), rank, 2, TIMEOUT)

    want, mine = sharded(mesh, 2.0), sharded(mesh, 5.0)
    cpu = torch.device("cpu")
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(group, range(2)))
        source = PGTransport[Any](groups[0], TIMEOUT, cpu)
        target = PGTransport[Any](groups[1], TIMEOUT, cpu, (lambda: {"w": mine}) if in_place else None)
        sent = pool.submit(source.send_checkpoint, [1], 1, {"w": want})
        got = target.recv_checkpoint(0, "", 1)
        sent.result(20)
    check(got["w"], want)
    assert (got["w"] is mine) is in_place
