"""Device meshes with a replicate dimension of the Manager, and HSDP over two replica groups in separate
processes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterator
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore

from tests.unit.children import run_python
from torchft.device_mesh import ft_init_device_mesh
from torchft.process_group import ManagedProcessGroup, ProcessGroupDummy

# See process_group/conftest.py.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


class Manager:
    """The methods of a Manager that making a mesh needs; the script below has those for training."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg

    def num_participants(self) -> int:
        return self._pg.size()


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mesh(
    manager: Any,
    shape: tuple[int, ...] = (2, 1),
    dim: int = 0,
    names: tuple[str, ...] = ("replicate", "shard"),
):  # type: ignore[no-untyped-def]
    return ft_init_device_mesh(
        device_type="cpu", mesh_shape=shape, mesh_dim_names=names, replicate_dim=dim, manager=manager
    )


@pytest.mark.usefixtures("world")
def test_the_replicate_dimension_is_the_managers() -> None:
    made = mesh(Manager(ProcessGroupDummy(0, 3)))
    assert made.mesh_dim_names == ("replicate", "shard")
    group = made.get_group("replicate")
    assert isinstance(group, ManagedProcessGroup)
    assert group.size() == 3
    assert not isinstance(made.get_group("shard"), ManagedProcessGroup)
    assert made["replicate"].get_group() is group
    assert made["shard"].size() == 1


@pytest.mark.usefixtures("world")
def test_a_mesh_of_replicas_only_and_in_any_place() -> None:
    assert isinstance(
        mesh(Manager(ProcessGroupDummy(0, 2)), (2,), 0, ("dp",)).get_group("dp"), ManagedProcessGroup
    )
    made = mesh(Manager(ProcessGroupDummy(0, 2)), (1, 2), 1, ("tp", "replicas"))
    assert isinstance(made.get_group("replicas"), ManagedProcessGroup)


@pytest.mark.usefixtures("world")
def test_a_mocked_manager_suffices() -> None:
    manager = MagicMock()
    manager._pg = ProcessGroupDummy(0, 1)
    manager.num_participants.return_value = 4
    assert mesh(manager).get_group("replicate").size() == 4


@pytest.mark.usefixtures("world")
def test_dimensions_that_do_not_fit_are_named() -> None:
    manager = Manager(ProcessGroupDummy(0, 1))
    with pytest.raises(ValueError, match=r"mesh_shape=\(2,\) and mesh_dim_names=\('replicate', 'shard'\)"):
        mesh(manager, (2,))
    for dim in (-1, 2):
        with pytest.raises(ValueError, match=f"replicate_dim={dim} must be an index"):
            mesh(manager, dim=dim)


_TRAIN = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchft.device_mesh import ft_init_device_mesh
from torchft.process_group import ProcessGroupGloo

class Manager:
    def __init__(self, pg):
        self._pg = pg

    def num_participants(self):
        return self._pg.size()

    def allreduce(self, tensor, reduce_op):
        average = reduce_op == dist.ReduceOp.AVG
        if average:
            tensor.div_(self._pg.size())
        return self._pg.allreduce([tensor], dist.ReduceOp.SUM if average else reduce_op)

replica, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = ProcessGroupGloo(timeout=timedelta(seconds=30))
group.configure(store, f"replica_{replica}", replica, 2)
torch.manual_seed(0)
model = nn.Linear(3, 2)
mesh = ft_init_device_mesh(
    device_type="cpu", mesh_shape=(2, 1), mesh_dim_names=("replicate", "shard"), replicate_dim=0,
    manager=Manager(group)
)
fully_shard(model, mesh=mesh)
model(torch.full((1, 3), float(replica + 1))).sum().backward()
print([p.grad.full_tensor().tolist() for p in model.parameters()])
group.shutdown()
dist.destroy_process_group()
"""


# PyTorch 2.7's fully_shard asserts an event of an accelerator when it has reduced over the replicas.
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="PyTorch 2.7 has no HSDP on a CPU"
)
def test_fully_shard_over_two_replicas() -> None:
    """The gradients of both groups are the mean of their own: the inputs were 1 and 2."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as pool:
        replicas = [pool.submit(run_python, _TRAIN, i, f"localhost:{store.port}/mesh") for i in range(2)]
    for replica in replicas:
        done = replica.result()
        assert done.stdout == f"{[[[1.5] * 3] * 2, [1.0] * 2]}\n", done.stderr
