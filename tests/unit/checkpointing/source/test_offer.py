"""What of a state is copied before it is offered."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchft.checkpointing.source import offer
from torchft.checkpointing.source.offer import with_copies


def test_small_tensors_are_copied_but_for_those_that_are_kept() -> None:
    weight, buffer, large = torch.ones(2), torch.arange(6.0), torch.ones(offer._SMALL_TENSOR)
    state = {
        "weight": weight,
        "buffers": [buffer, buffer[2:4]],
        "large": large,
        "of": torch.nn.Parameter(buffer),
        "a": 1,
    }
    copied, devices = with_copies(state, {weight.data_ptr()})
    assert devices == {torch.device("cpu")}
    for tensor in (weight, buffer, large):
        tensor.fill_(7)
    assert copied["weight"] is weight and copied["large"] is large and copied["a"] == 1
    first, part = copied["buffers"]
    assert first.tolist() == [0, 1, 2, 3, 4, 5] and part.tolist() == [2, 3]
    assert type(copied["of"]) is torch.nn.Parameter and copied["of"].requires_grad
    assert {tensor.untyped_storage().data_ptr() for tensor in (first, part, copied["of"])} == {
        first.data_ptr()
    }


def test_no_more_is_copied_than_a_limit_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offer, "_SMALL_TENSORS", 20)
    state = [torch.ones(2), torch.ones(2), torch.ones(2)]
    copied, _ = with_copies(state, set())
    assert [one is other for one, other in zip(state, copied)] == [False, False, True]


def test_tensors_that_move_are_copied_whatever_their_size() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        large = torch.ones(offer._SMALL_TENSOR)
        shard = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        state = {"large": large, "shard": torch.nn.Parameter(shard)}
        addresses = {large.data_ptr(), shard.to_local().data_ptr()}
        assert with_copies(state, addresses)[0]["shard"] is state["shard"]
        copied, _ = with_copies(state, addresses, addresses)
        large.zero_(), shard.to_local().zero_()
        assert copied["large"].eq(1).all() and copied["shard"].to_local().eq(1).all()
        assert isinstance(copied["shard"], torch.nn.Parameter) and copied["shard"].requires_grad
    finally:
        dist.destroy_process_group()
