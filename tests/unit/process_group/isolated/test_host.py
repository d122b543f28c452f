"""Host tensors in an isolated group: the caller's memory, and tensors that cannot be registered."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions

from tests.unit.process_group.ranks import TIMEOUT, meeting, on_ranks
from torchft.process_group import ProcessGroup, ProcessGroupGloo


def test_other_views_of_the_memory_see_the_result(pair: list[ProcessGroup]) -> None:
    """The caller's storage is not moved."""

    def call(rank: int) -> None:
        array = np.full(8, float(rank + 1), dtype=np.float32)
        tensor = torch.from_numpy(array)
        where = tensor.data_ptr()
        pair[rank].allreduce([tensor], ReduceOp.SUM).wait()
        assert array.tolist() == [3.0] * 8
        assert tensor.data_ptr() == where and not tensor.is_shared()

    on_ranks(2, call)


@pytest.mark.parametrize("size", [4, 1 << 16], ids=["small", "large"])
def test_memory_that_is_freed_and_allocated_again(alone: ProcessGroup, size: int) -> None:
    """Addresses are reused: information about the old memory must not be applied to the new."""
    addresses = set()
    for i in range(20):
        tensor = torch.full((size,), float(i))
        if i % 2:
            tensor.share_memory_()
        addresses.add(tensor.data_ptr())
        gathered = torch.zeros(size)
        alone.allgather([[gathered]], [tensor], AllgatherOptions()).wait()
        assert gathered.eq(i).all()
        del tensor
    assert len(addresses) < 20


def test_shared_memory_is_registered_as_it_is(pair: list[ProcessGroup]) -> None:
    def call(rank: int) -> None:
        whole = torch.zeros(3 << 16).share_memory_()
        where = whole.data_ptr()
        part = whole[1 << 16 : 2 << 16]
        part += rank + 1
        pair[rank].allreduce([part], ReduceOp.SUM).wait()
        assert part.eq(3).all() and whole.sum() == 3 * part.numel()
        assert whole.data_ptr() == where

    on_ranks(2, call)
    sharing: Any = pair[1]._worker.devices.sharing(0)  # type: ignore[attr-defined]
    assert not sharing._free and sharing._freed.qsize() == 1


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1:3], lambda t: t[0].expand(2, 4)],
    ids=["transposed", "every other", "inner", "expanded"],
)
def test_gaps_in_memory_are_treated_as_by_gloo(
    store: TCPStore, alone: ProcessGroup, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    plain = ProcessGroupGloo(TIMEOUT)
    plain.configure(meeting(store), "replica", 0, 1)
    seen: list[Any] = []
    for group in (plain, alone):
        tensor = torch.arange(12.0).reshape(3, 4)
        gathered = torch.zeros(view(tensor).shape)
        try:
            group.allreduce([view(tensor)], ReduceOp.SUM).wait()
            group.allgather([[gathered]], [view(tensor)], AllgatherOptions()).wait()
            seen.append([tensor.tolist(), gathered.tolist()])
        except Exception as e:
            seen.append((type(e), str(e)))
    plain.shutdown()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("size", [3, 1 << 16], ids=["small", "large"])
def test_a_tensor_whose_memory_differs_from_its_values(alone: ProcessGroup, size: int) -> None:
    """Tensors with a pending negation, or of a subclass that overrides operations."""

    class Loud(torch.Tensor):
        pass

    negated = torch.complex(torch.zeros(size), torch.ones(size)).conj().imag
    loud = torch.arange(float(size)).as_subclass(Loud)
    assert negated.is_neg()
    for tensor in (negated, loud):
        gathered = torch.zeros(size)
        alone.allgather([[gathered]], [tensor], AllgatherOptions()).wait()
        assert torch.equal(gathered, tensor.as_subclass(torch.Tensor))
    alone.broadcast_one(loud, 0).wait()
    alone.allreduce([loud], ReduceOp.SUM).wait()
    assert type(loud) is Loud and loud[2] == 2


def test_a_pending_negation_in_shared_memory(alone: ProcessGroup) -> None:
    """Its storage is known to the worker already."""
    memory = torch.ones(1 << 16).share_memory_()
    alone.broadcast_one(memory, 0).wait()
    gathered = torch.zeros(1 << 16)
    alone.allgather([[gathered]], [torch._neg_view(memory)], AllgatherOptions()).wait()
    assert gathered.eq(-1).all()


def test_a_tensor_that_requires_grad(alone: ProcessGroup) -> None:
    weight = torch.ones(4, requires_grad=True)
    alone.allreduce([weight], ReduceOp.SUM).wait()
    assert weight.requires_grad and weight.is_leaf


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, device="meta"), "torchft-baby-gloo: allreduce: a tensor on meta is not supported"),
        (torch.eye(2).to_sparse(), "torchft-baby-gloo: allreduce: .*sparse_coo.*dense"),
    ],
    ids=["meta", "sparse"],
)
def test_what_cannot_be_registered_is_refused_by_name(
    alone: ProcessGroup, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        alone.allreduce([tensor], ReduceOp.SUM)
    assert alone.errored() is None
    assert not alone.share_buffer(tensor)


@pytest.mark.parametrize("given", [[3], [None], [[torch.ones(1)]]], ids=["number", "nothing", "list"])
def test_an_argument_that_is_no_tensor_is_named(alone: ProcessGroup, given: Any) -> None:
    with pytest.raises(TypeError, match=r"torchft-baby-gloo: allreduce: .* is no tensor"):
        alone.allreduce(given, ReduceOp.SUM)
    assert alone.errored() is None
