"""The upstream format: targets of all versions find the parts that they look for."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.codec.requests import FULL, METADATA
from torchft.checkpointing.codec.stream import read_object, storage_bytes, tensor_memory
from torchft.checkpointing.codec.upstream import MAIN_PARTS
from torchft.checkpointing.source.checkpoint import Checkpoint

ORDER = [("default", "set_state_dict_fns"), ("set_state_dict_fns", "default")]


def state(**user: Any) -> dict[str, Any]:
    return {"user": user, "torchft": {"step": 3, "batches_committed": 6}}


def weights() -> dict[str, Any]:
    return {f"layer{i}": torch.full((1000,), float(i)) for i in range(5)}


def stream(checkpoint: Checkpoint, key: str) -> bytes:
    pickled = checkpoint.stream(key)
    assert pickled is not None
    return pickled.prefix + b"".join(bytes(tensor_memory(storage_bytes(s))) for s in pickled.storages)


def read(data: bytes) -> Any:
    return read_object(io.BytesIO(data), "the state", len(data))


@pytest.mark.parametrize(("given", "other"), ORDER)
def test_the_main_part_has_all_names_and_is_sent_once(given: str, other: str) -> None:
    sent = stream(Checkpoint(state(**{given: weights(), "data": torch.ones(3)}), 0), FULL)
    plain = stream(Checkpoint(state(model=weights(), data=torch.ones(3)), 0), FULL)
    assert len(sent) < len(plain) + 2000, "tensors have 20,000 bytes"
    user = read(sent)["user"]
    assert user["data"].tolist() == [1.0] * 3
    for name, tensor in weights().items():
        assert torch.equal(user[given][name], tensor)
        assert user[given][name].data_ptr() == user[other][name].data_ptr()


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7])
def test_in_chunks_too(num_chunks: int) -> None:
    checkpoint = Checkpoint(state(data=1, default=weights()), num_chunks)
    chunks = [stream(checkpoint, str(i)) for i in range(num_chunks)]
    assert sum(len(chunk) for chunk in chunks) < 20_000 + 3000 * num_chunks
    leaves = [read(chunk) for chunk in chunks]
    spec = read(stream(checkpoint, METADATA))
    got = pytree.tree_unflatten(
        [leaves[i % num_chunks][i // num_chunks] for i in range(spec.num_leaves)], spec
    )
    for name in MAIN_PARTS:
        assert all(torch.equal(got["user"][name][layer], tensor) for layer, tensor in weights().items())
    assert got["torchft"] == {"step": 3, "batches_committed": 6} and got["user"]["data"] == 1


@pytest.mark.parametrize("other", [{"user": {"model": 1}, "torchft": {}}, {"weights": 1}, [1, 2], state()])
def test_another_state_is_unchanged(other: Any) -> None:
    assert read(stream(Checkpoint(other, 0), FULL)) == other


def test_both_names_in_use_are_two_parts() -> None:
    both = state(default=1, set_state_dict_fns=2)
    assert read(stream(Checkpoint(both, 0), FULL)) == both
