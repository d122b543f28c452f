"""The files of a checkpoint: PyTorch reads the whole state from them, whatever wrote its parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from tests.unit.checkpointing.checkpoint_states import assert_same
from tests.unit.checkpointing.snapshots.contents import as_rank, content, load, plain, run, save
from torchft.checkpointing.snapshots import disk
from torchft.checkpointing.snapshots.disk import DiskError, assign, place_of, size_of
from torchft.checkpointing.snapshots.saving import Save

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.7's own writer
]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("cut", [64 << 20, 1000])
def test_a_checkpoint_has_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int, cut: int
) -> None:
    monkeypatch.setattr(disk, "CUT", cut)
    save(tmp_path, 7, parts=parts)
    assert_same(load(tmp_path / "step-7", plain()), plain(7))


@pytest.mark.slow  # test_a_checkpoint_has_the_state reads it with PyTorch
def test_a_process_without_torchft_reads_it(tmp_path: Path) -> None:
    save(tmp_path, 7)
    script = """
import torch, torch.distributed.checkpoint as dcp
state = {"model": {"w": torch.zeros(4, 3)}, "data": {"epoch": 0}}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
print(state["model"]["w"].sum().item(), state["data"]["epoch"])
"""
    assert run(script, tmp_path / "step-7").split() == [str(plain(7)["model"]["w"].sum().item()), "7"]
    script = """
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save(sys.argv[1], sys.argv[2])
print(torch.load(sys.argv[2], weights_only=False)["optimizer"]["lr"])
"""
    assert run(script, tmp_path / "step-7", tmp_path / "one_file").split() == ["0.1"]


def part(whole: torch.Tensor, mesh: Any, dim: int) -> DTensor:
    """The shard of this rank, made without the others."""
    rows = -(-whole.shape[dim] // mesh.size())
    begin = min(rows * mesh.get_rank(), whole.shape[dim])
    local = whole.narrow(dim, begin, min(rows, whole.shape[dim] - begin)).clone()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def sharded(rank: int, ranks: int) -> Any:
    """The state of a rank of an HSDP group, in which one tensor has fewer rows than there are ranks."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    return {
        "w": part(torch.arange(21.0).reshape(7, 3), mesh, 0),
        "short": part(torch.ones(1, 2), mesh, 0),
        "columns": part(torch.arange(10).reshape(2, 5), mesh, 1),
        "same": DTensor.from_local(torch.full((3,), 5.0), mesh, [Replicate()], run_check=False),
        "plain": torch.full((2,), 6.0),
        f"of rank {rank}": torch.tensor(rank),
    }


_READER = """
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
folder, store, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
mesh = init_device_mesh("cpu", (ranks,))
state = {
    "w": distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)]),
    "short": distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)]),
    "columns": distribute_tensor(torch.zeros(2, 5, dtype=torch.int64), mesh, [Shard(1)]),
    "same": torch.zeros(3), "plain": torch.zeros(2), "of rank 1": torch.tensor(0),
}
dcp.load(state, checkpoint_id=folder)
assert torch.equal(state["w"].full_tensor(), torch.arange(21.0).reshape(7, 3)), state
assert torch.equal(state["short"].full_tensor(), torch.ones(1, 2)), state
assert torch.equal(state["columns"].full_tensor(), torch.arange(10).reshape(2, 5)), state
assert state["same"].tolist() == [5, 5, 5] and state["plain"].tolist() == [6, 6] and state["of rank 1"] == 1
dist.destroy_process_group()
print("read")
"""


@pytest.mark.slow  # test_a_checkpoint_has_the_state has one process
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_shards_of_two_ranks_are_read_by_any_number(tmp_path: Path, readers: int) -> None:
    one = Save(tmp_path, 3, "k", 2, 2)
    contents = []
    for rank in range(2):
        with as_rank(rank, 2):
            contents.append(content(sharded(rank, 2), rank))
        one.announce(rank, contents[rank])
    for unit in one.missing():
        one.write(unit, contents[unit[0]])
    one.complete()
    blocked = f"import sys; sys.modules['torchft'] = None\n{_READER}"
    command = [sys.executable, "-W", "ignore", "-c", blocked, tmp_path / "step-3", tmp_path / "store"]
    started = [
        subprocess.Popen([*command, str(rank), str(readers)], stdout=subprocess.PIPE)
        for rank in range(readers)
    ]
    try:
        assert [each.communicate(timeout=120)[0] for each in started] == [b"read\n"] * readers
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.mark.parametrize(
    ("mesh", "shape", "placements"),
    [
        ((4,), (10, 3), [Shard(0)]),
        ((4,), (2, 3), [Shard(0)]),
        ((4,), (3, 9), [Shard(1)]),
        ((2, 2), (10, 3), [Replicate(), Shard(0)]),
        ((2, 2), (10, 6), [Shard(1), Shard(0)]),
        ((2, 2), (10, 6), [Shard(0), Shard(0)]),
        ((2, 2), (8, 6), [_StridedShard(0, split_factor=2), Shard(0)]),  # FSDP2 and tensor parallelism
    ],
)
def test_the_place_of_a_shard_is_that_of_pytorch(
    mesh: tuple[int, ...], shape: tuple[int, ...], placements: Sequence[Any]
) -> None:
    from torchft.checkpointing.codec.dtensor import SpecEncoder

    for rank in range(4):
        with as_rank(rank, 4):
            on = init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b")[: len(mesh)])
            size, at = compute_local_shape_and_global_offset(torch.Size(shape), on, placements)
            strides = torch.empty(shape).stride()
            made = DTensor.from_local(
                torch.zeros(size), on, placements, run_check=False, shape=torch.Size(shape), stride=strides
            )
            spec = SpecEncoder().encode(made._spec)
            assert spec is not None
            whole, found = place_of(spec, list(size), rank, "w")
            assert whole == list(shape)
            if 0 not in size:  # where nothing is has no place
                assert found == list(at)


def test_a_submesh_has_the_ranks_place_in_it() -> None:
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
            (item,) = content({"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])}, rank).items
            assert item.tensor_data is not None
            assert item.tensor_data.chunk.offsets == (3 * (rank % 2),) and item.tensor_data.size == (6,)


def test_what_has_no_place_is_refused_by_name() -> None:
    with as_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
        with pytest.raises(DiskError, match=r"rank 0: \['w'\] is a DTensor with partial sums"):
            content({"w": partial})
        shard = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(DiskError, match=r"on a mesh of ranks \[0, 1\], in which rank 2 has no place"):
            content({"w": shard}, rank=2)
        odd = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=(9,), stride=(1,))
        with pytest.raises(DiskError, match=r"shard of shape \[3\], which is not one part of \[9\]"):
            content({"w": odd})


def test_each_item_is_assigned_once_and_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CUT", 4096)
    same = {f"w{i}": torch.zeros(1000 * (i % 5) + 1) for i in range(40)}
    ranks = [content({**same, "own": {str(rank): torch.zeros(9)}}, rank).items for rank in range(3)]
    shares = assign(ranks, 2)
    assert shares == assign(ranks, 2)
    indices = [item.index for of in shares for share in of for item in share]
    assert len(indices) == len(set(indices)) and set(indices) == {
        item.index for items in ranks for item in items
    }
    sizes = [sum(map(size_of, share)) for of in shares for share in of]
    assert max(sizes) - min(sizes) <= 2 * 4096
    for rank in range(3):
        assert f"own.{rank}" in {item.index.fqn for share in shares[rank] for item in share}


def test_a_tensor_of_which_a_part_is_nowhere_is_refused(tmp_path: Path) -> None:
    one = Save(tmp_path, 3, "k", 1, 1)
    with as_rank(0, 2):
        half = content({"w": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])})
    one.announce(0, half)
    one.write((0, 0), half)
    with pytest.raises(DiskError, match="no rank has all of w"):
        one.complete()
    assert not (tmp_path / "step-3").exists()
