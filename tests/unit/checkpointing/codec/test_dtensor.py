"""DTensors: the local shard is sent, with the data from which the target makes a DTensor of it."""

from __future__ import annotations

import io
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from torchft.checkpointing import HTTPTransport
from torchft.checkpointing._serialization import _streaming_load, _streaming_save
from torchft.checkpointing.client.places import Destination
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.codec.encoding import Encoded, decode
from torchft.checkpointing.codec.handshake import StateRegion, Structure
from torchft.checkpointing.codec.stream import read_object, storage_bytes
from torchft.checkpointing.pg_transport import PGTransport
from torchft.checkpointing.transport import CheckpointError

TIMEOUT = timedelta(seconds=20)


class Odd(Shard):
    """A placement that PyTorch does not have."""


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
    assert torch.equal((got + 1).to_local(), want.to_local() + 1)  # the tensor can be used in a computation


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


def check_all(got: Any, want: dict[str, Any]) -> None:
    check(got["w"], want["w"])
    check(got["other"], want["other"])
    assert got["w"].device == torch.device("cpu") and torch.equal(got["plain"], want["plain"])


def test_a_source_of_upstream(mesh: Any) -> None:
    want = {"w": sharded(mesh, 2.0), "plain": torch.ones(2), "other": sharded(mesh, 3.0)}
    file = io.BytesIO()
    _streaming_save(want, file)  # type: ignore[arg-type]
    file.seek(0)
    check_all(read_object(file, "a stream"), want)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_target_of_upstream(mesh: Any) -> None:
    want = {"w": sharded(mesh, 2.0), "plain": torch.ones(2), "other": sharded(mesh, 3.0)}
    source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks=0)
    source.send_checkpoint([1], 1, want, TIMEOUT)
    try:
        with urllib.request.urlopen(f"{source.metadata()}1/full", timeout=20) as answer:
            sent = answer.read()
    finally:
        source.shutdown()
    check_all(_streaming_load(io.BytesIO(sent), weights_only=False), want)  # type: ignore[arg-type]


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


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Makes this process rank 1 of a process group whose collectives do nothing, which suffices to make
    DTensors of any mesh.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def placed(name: str) -> Any:
    """A DTensor of one of these kinds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    local = torch.arange(6.0).reshape(2, 3)
    flat = init_device_mesh("cpu", (4,))
    # the names are also tags of the encoding
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("T", "P"))
    return {
        "sharded": lambda: DTensor.from_local(local, flat, [Shard(1)]),
        "uneven": lambda: DTensor.from_local(
            local, flat, [Shard(0)], shape=torch.Size([7, 3]), stride=(3, 1)
        ),
        "sharded twice": lambda: DTensor.from_local(local, square, [Shard(0), Shard(0)]),
        "strided": lambda: DTensor.from_local(local, square, [_StridedShard(0, split_factor=2), Shard(0)]),
        "replicated": lambda: DTensor.from_local(local, square, [Replicate(), Shard(1)]),
        "partial": lambda: DTensor.from_local(local, square, [Partial("avg"), Partial("sum")]),
        "on a part of a mesh": lambda: DTensor.from_local(local, square["P"], [Shard(0)]),
        "with a gradient": lambda: DTensor.from_local(local, flat, [Replicate()]).requires_grad_(),
        "a parameter": lambda: torch.nn.Parameter(DTensor.from_local(local, flat, [Shard(0)])),
    }[name]()


KINDS = ["sharded", "uneven", "sharded twice", "strided", "replicated", "partial", "on a part of a mesh"]
KINDS += ["with a gradient", "a parameter"]


def sent(state: Any, **kwargs: Any) -> Any:
    encoded = Encoded(state)
    flats = [storage_bytes(storage) for storage in encoded.storages]
    return decode(json.loads(encoded.structure), flats, "the state", **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_no_pickle_is_needed(four_ranks: None, kind: str) -> None:
    want = placed(kind)
    structure = json.loads(Encoded({"w": want}).structure)
    assert structure[2][0] == "D" and structure[2][2][0] == "spec"

    got = sent({"w": want})["w"]
    assert type(got) is type(want) and got.requires_grad == want.requires_grad
    assert got._spec == want._spec and torch.equal(got.to_local(), want.to_local())
    groups = [mesh.get_all_groups() for mesh in (got.device_mesh, want.device_mesh)]
    assert [g.group_name for g in groups[0]] == [g.group_name for g in groups[1]]
    with torch.no_grad():
        want.zero_().copy_(got)  # PyTorch considers both to be tensors of one mesh
    assert torch.equal(got.to_local(), want.to_local())


def test_tensors_of_a_mesh_share_it(four_ranks: None) -> None:
    first, second = sent([placed("sharded"), placed("uneven")])
    assert first.device_mesh is second.device_mesh


def test_a_mesh_may_be_named_like_tags_of_the_encoding(four_ranks: None) -> None:
    want, mine = placed("replicated"), placed("replicated")
    mine.to_local().zero_()
    encoded = Encoded({"w": want})
    structure = Structure(
        [StateRegion(storage.nbytes()) for storage in encoded.storages], json.loads(encoded.structure)
    )
    target = TargetState(lambda: {"w": mine}, writable=True)
    placed_at = Destination(structure, target, "the state", torch.device).regions[0]
    assert (placed_at.data_ptr(), placed_at.numel()) == (mine.to_local().data_ptr(), 24)


def test_placements_of_other_types_are_pickled_and_refused(four_ranks: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    state = {"w": DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (4,)), [Odd(0)])}
    assert json.loads(Encoded(state).structure)[2][2][0] == "P"
    with pytest.raises(CheckpointError, match=r"\['w'\], .*Odd.*add_safe_globals"):
        sent(state)


def test_without_torch_distributed_the_error_names_it(mesh: Any) -> None:
    encoded = Encoded({"w": sharded(mesh, 1.0)})
    flats = [storage_bytes(storage) for storage in encoded.storages]
    dist.destroy_process_group()
    try:
        with pytest.raises(CheckpointError, match=r"where torch\.distributed is initialized"):
            decode(json.loads(encoded.structure), flats, "the state")
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((0,), "cpu\0"),
        ((1,), [[0, 1], [2]]),
        ((1,), "0"),
        ((1,), [[0, 0], [1, 2]]),
        ((2,), [1, 2]),
        ((2,), ["one"]),
        ((3,), ["nobody", "knows", "these"]),
        ((3,), [["tag", -1, "name"], "x"]),
        ((4,), ["not a dimension"]),
        ((4,), [[]]),
    ],
)
def test_a_malformed_mesh_is_an_error(four_ranks: None, path: tuple[int], value: Any) -> None:
    encoded = Encoded({"w": placed("on a part of a mesh")})
    flats = [storage_bytes(storage) for storage in encoded.storages]
    tree = json.loads(encoded.structure)
    tree[2][2][1][path[0]] = value
    with pytest.raises(CheckpointError, match="malformed"):
        decode(tree, flats, "the state")


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (2, []),
        (2, [["S", -1], ["R"]]),
        (2, [["S", 0, 0], ["R"]]),
        (2, [["+", 1], ["R"]]),
        (2, [["Q"], ["R"]]),
        (2, [["SS", 0], ["R"]]),
        (3, [[1], [1, 1], "float32"]),
        (3, [[-1], [1], "float32"]),
        (3, [[1], [1], "os"]),
        (4, [[0, [5]]]),
        (4, [["0", [0]]]),
    ],
)
def test_a_malformed_spec_is_an_error(four_ranks: None, index: int, value: Any) -> None:
    encoded = Encoded({"w": placed("replicated")})
    flats = [storage_bytes(storage) for storage in encoded.storages]
    tree = json.loads(encoded.structure)
    tree[2][2][index] = value
    with pytest.raises(CheckpointError, match="malformed"):
        decode(tree, flats, "the state")
