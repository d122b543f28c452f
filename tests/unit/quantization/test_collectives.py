"""The quantized collectives on the CPU: their error bounds, the bytes that they send, failures, and bad
input.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceScatterOptions

from tests.unit.process_group.backends import NATIVE, native
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.collectives import (
    allocate_reduce_scatter_output,
    allreduce_quantized,
    get_padded_sizes,
    reduce_scatter_quantized,
)
from torchft.process_group import (
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    reconfigure_with_store,
)
from torchft.quantization import FORMAT_ENV

# The workers of isolated groups import torch, which is slow on a busy machine.
START_TIMEOUT = timedelta(seconds=100)

MAKERS: dict[str, Callable[[TCPStore, int], Any]] = {
    "gloo": lambda store, rank: ProcessGroupGloo(timeout=TIMEOUT),
    "isolated": lambda store, rank: ProcessGroupBabyGloo(timeout=START_TIMEOUT),
    "native": native,
}


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="module", params=MAKERS)
def groups(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[list[Any]]:
    """One process group for each of three ranks, connected with each other."""
    if request.param == "native" and not NATIVE:
        pytest.skip("this PyTorch has no native groups that can be reconfigured")
    made = on_ranks(3, lambda rank: MAKERS[request.param](store, rank), START_TIMEOUT)
    address = meeting(store)
    on_ranks(
        3, lambda rank: reconfigure_with_store(made[rank], address, rank, 3, START_TIMEOUT), START_TIMEOUT
    )
    yield made
    for group in made:
        group.shutdown()


@pytest.fixture
def pair(store: TCPStore) -> Iterator[list[Any]]:
    """Process groups of two connected ranks, for tests that break them."""
    made = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(made, store)
    yield made
    for group in made:
        group.shutdown()


def normal(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def options(op: Any) -> AllreduceOptions:
    opts = AllreduceOptions()
    opts.reduceOp = op
    return opts


@pytest.mark.parametrize("fmt", ["fp8", "int8"])
def test_allreduce_is_a_sum_within_the_bounds(
    groups: list[Any], fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORMAT_ENV, fmt)
    inputs = [[normal(rank, 700, 7), normal(rank, 13).bfloat16(), torch.zeros(0)] for rank in range(3)]
    tensors = [[t.clone() for t in mine] for mine in inputs]

    def run(rank: int) -> None:
        work = allreduce_quantized(tensors[rank], ReduceOp.SUM, groups[rank])
        assert work.wait() and work.is_completed() and work.is_success()
        assert work.get_future().wait() is tensors[rank]

    on_ranks(3, run)
    for i in range(3):
        assert all(torch.equal(tensors[rank][i], tensors[0][i]) for rank in range(3))
        parts = [mine[i].double() for mine in inputs]
        want = parts[0] + parts[1] + parts[2]
        if not want.numel():
            continue
        # The error bounds of torchft.quantization. Two roundings contribute: that of the inputs, and that of
        # their sum. The rounded sum contains the errors of the inputs, so the bound of the second rounding
        # (fp8) includes them.
        if fmt == "fp8":
            bound = (
                sum(p.abs() / 16 for p in parts) + (want.abs() + sum(p.abs() for p in parts) / 16) / 16 + 1e-4
            )
        else:
            bound = sum(p.abs().max() for p in parts) * 2.02 / 127
        bound = bound + want.abs() * 2**-8 * (inputs[0][i].dtype == torch.bfloat16)
        assert ((tensors[0][i].double() - want).abs() <= bound).all()
        assert not torch.equal(tensors[0][i].double(), want)  # it was rounded to 8 bits


def test_average_divides_by_the_ranks(groups: list[Any]) -> None:
    tensors = [torch.full((10,), 3.0 * rank) for rank in range(3)]
    on_ranks(3, lambda rank: allreduce_quantized([tensors[rank]], options(ReduceOp.AVG), groups[rank]).wait())
    assert all(t.tolist() == [3.0] * 10 for t in tensors)


def test_several_at_once_beside_other_collectives(groups: list[Any]) -> None:
    """The threads of quantized collectives only send and receive. So the collectives that the training thread
    starts in the meantime are in the same order on all ranks, as Gloo requires.
    """
    tensors = [[torch.full((5000,), float(2**i)) for i in range(4)] for _ in range(3)]
    others = [[torch.full((100,), float(i)) for i in range(4)] for _ in range(3)]

    def run(rank: int) -> None:
        works = []
        for mine, other in zip(tensors[rank], others[rank]):
            works.append(allreduce_quantized([mine], ReduceOp.SUM, groups[rank]))
            works.append(groups[rank].allreduce([other], options(ReduceOp.SUM)))
        for work in reversed(works):
            work.wait()

    on_ranks(3, run)
    for mine, other in zip(tensors, others):
        assert [t.unique().item() for t in mine] == [3, 6, 12, 24]
        assert [t.unique().item() for t in other] == [0, 3, 6, 9]


def test_future_ends_later(groups: list[Any]) -> None:
    tensors = [torch.ones(10_000) for _ in range(3)]

    def run(rank: int) -> object:
        future = allreduce_quantized([tensors[rank]], ReduceOp.SUM, groups[rank]).get_future()
        return future.then(lambda done: done.value()[0].unique().item()).wait()

    assert on_ranks(3, run) == [3, 3, 3]


def test_values_that_are_not_finite_become_nan_at_their_place_only(groups: list[Any]) -> None:
    tensors = [torch.ones(8) for _ in range(3)]
    tensors[0][1], tensors[1][2], tensors[2][2] = float("nan"), float("inf"), float("-inf")
    on_ranks(3, lambda rank: allreduce_quantized([tensors[rank]], ReduceOp.SUM, groups[rank]).wait())
    for tensor in tensors:
        assert tensor.isnan().tolist() == [False, True, True] + [False] * 5
        assert tensor[3:].tolist() == [3.0] * 5


def test_reduce_scatter_leaves_each_rank_its_rows(groups: list[Any]) -> None:
    inputs = [[normal(rank, 5, 3), normal(rank, 3)] for rank in range(3)]

    def run(rank: int) -> torch.Tensor:
        output, sizes = allocate_reduce_scatter_output(inputs[rank], 3)
        assert sizes == [torch.Size([6, 3]), torch.Size([3, 1])]
        opts = ReduceScatterOptions()
        opts.reduceOp = ReduceOp.AVG
        output.fill_(99)
        work = reduce_scatter_quantized(output, inputs[rank], opts, groups[rank])
        assert work.wait() and work.get_future().wait() is output
        return output

    got = on_ranks(3, run)
    rows = torch.cat([sum(mine[0] for mine in inputs), torch.zeros(1, 3)]) / 3
    ends = sum(mine[1] for mine in inputs) / 3
    for rank in range(3):
        want = torch.cat([rows[2 * rank : 2 * rank + 2].flatten(), ends[rank : rank + 1]])
        torch.testing.assert_close(got[rank], want, rtol=0, atol=0.2)
        assert (got[rank] - want).abs().max() > 0
    assert got[2][3:6].tolist() == [0.0] * 3  # the padding


# The number of bytes sent


class CountingGroup(ProcessGroupWrapper):
    """Counts the bytes that its rank sends to others."""

    def __init__(self, pg: ProcessGroupGloo) -> None:
        super().__init__(pg=pg)
        self.sent = 0
        self.calls: set[str] = set()

    def _run(self, name: str, *args: Any, **kwargs: Any) -> dist.Work:
        self.calls.add(name)
        if name == "send":
            self.sent += args[0][0].nbytes
        return super()._run(name, *args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quarter_of_the_bytes_is_sent(store: TCPStore, dtype: torch.dtype) -> None:
    """A quarter for float32, half for bfloat16, compared with an unquantized ring allreduce, which sends the
    fewest bytes.
    """
    inner = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(3)]
    connect(inner, store)
    groups = [CountingGroup(group) for group in inner]
    tensors = [torch.ones(300_000, dtype=dtype) for _ in range(3)]
    on_ranks(3, lambda rank: allreduce_quantized([tensors[rank]], ReduceOp.SUM, groups[rank]).wait())
    full = 2 * (3 - 1) / 3 * tensors[0].nbytes
    for group in groups:
        assert group.calls == {"send", "recv"}  # so `sent` counts all bytes
        assert full / tensors[0].itemsize <= group.sent <= 1.01 * full / tensors[0].itemsize
    for group in inner:
        group.shutdown()


# Failures


def test_shapes_that_differ_are_named_before_anything_is_reduced(pair: list[Any]) -> None:
    tensors = [torch.ones(3), torch.ones(2, 2)]
    errors = in_threads(
        [lambda r=r: allreduce_quantized([tensors[r]], ReduceOp.SUM, pair[r]).wait() for r in range(2)]
    )
    for rank, error in enumerate(errors):
        assert isinstance(error, ValueError)
        assert (
            "float32[3]" in str(error)
            and "float32[2, 2]" in str(error)
            and f"in rank {1 - rank}" in str(error)
        )
    assert [t.sum().item() for t in tensors] == [3, 4]
    tensors = [torch.ones(3) for _ in range(2)]  # the group still works
    on_ranks(2, lambda rank: allreduce_quantized([tensors[rank]], ReduceOp.SUM, pair[rank]).wait())
    assert tensors[0].tolist() == [2.0] * 3


def test_difference_at_the_end_of_many_tensors_is_noticed(pair: list[Any]) -> None:
    tensors = [[torch.ones(3) for _ in range(200)] + [torch.ones(4 + rank)] for rank in range(2)]
    errors = in_threads(
        [lambda r=r: allreduce_quantized(tensors[r], ReduceOp.SUM, pair[r]).wait() for r in range(2)]
    )
    assert all(
        isinstance(error, ValueError) and "quantized collective differs" in str(error) for error in errors
    )


def test_an_absent_peer(pair: list[Any]) -> None:
    """The peer takes no part, and then its group ends."""
    tensor = torch.ones(10)
    work = allreduce_quantized([tensor], ReduceOp.SUM, pair[0])
    with pytest.raises(TimeoutError, match="did not complete within"):
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed() and work.exception() is None
    pair[1].shutdown()
    with pytest.raises(RuntimeError):
        work.wait(TIMEOUT / 2)
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    assert tensor.tolist() == [1.0] * 10
    with pytest.raises(RuntimeError):
        work.get_future().wait()


def test_abort_ends_all_of_them_and_their_threads(pair: list[Any]) -> None:
    pair[0].set_timeout(TIMEOUT)
    works = [allreduce_quantized([torch.ones(10)], ReduceOp.SUM, pair[0]) for _ in range(3)]
    future = works[2].get_future()
    pair[0].abort()
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait(TIMEOUT / 2)
    with pytest.raises(RuntimeError):
        future.wait()
    for thread in threading.enumerate():
        if thread.name == "torchft_quantized":
            thread.join(10)
            assert not thread.is_alive()


def test_new_peers_are_not_delayed_by_the_old_ones(pair: list[Any], store: TCPStore) -> None:
    """An operation whose peer has aborted fails. It must not delay operations with the group's new peers."""
    pair[0].set_timeout(TIMEOUT)
    stuck = allreduce_quantized([torch.ones(10)], ReduceOp.SUM, pair[0])
    pair[1].abort()
    connect(pair, store)
    tensors = [torch.ones(10) for _ in range(2)]
    on_ranks(2, lambda rank: allreduce_quantized([tensors[rank]], ReduceOp.SUM, pair[rank]).wait(TIMEOUT / 2))
    assert tensors[0].tolist() == [2.0] * 10
    with pytest.raises(RuntimeError):
        stuck.wait(TIMEOUT / 2)


def test_a_group_without_peers_for_a_moment_gets_other_peers(
    pair: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another thread connects a group with new peers, the group has no backend, and its methods
    raise.
    """
    began = threading.Event()
    recv = type(pair[0]).recv

    def not_initialized(self: Any, *args: Any) -> Any:
        if threading.current_thread().name == "torchft_quantized":
            began.set()
            raise AssertionError("process group not initialized")
        return recv(self, *args)

    monkeypatch.setattr(type(pair[0]), "recv", not_initialized)
    with pytest.raises(RuntimeError, match="other peers in the middle of a quantized collective"):
        allreduce_quantized([torch.ones(10)], ReduceOp.SUM, pair[0]).wait(TIMEOUT / 2)
    assert began.is_set()


# One rank, and bad input


def test_rank_without_peers_keeps_its_numbers() -> None:
    tensor = torch.tensor([1 / 3])
    allreduce_quantized([tensor], ReduceOp.AVG, ProcessGroupDummy(0, 1)).wait()
    output = torch.zeros(1)
    reduce_scatter_quantized(output, [tensor], ReduceOp.SUM, ProcessGroupDummy(0, 1)).wait()
    assert tensor.item() == output.item() == torch.tensor(1 / 3).item()


def test_nothing_to_reduce() -> None:
    group = ProcessGroupDummy(0, 2)  # a group whose operations must not be called
    assert allreduce_quantized([], ReduceOp.SUM, group).wait()
    assert allreduce_quantized([torch.zeros(0, 3)], ReduceOp.SUM, group).wait()


def test_bad_input() -> None:
    group = ProcessGroupDummy(0, 1)
    with pytest.raises(
        ValueError, match=r"tensors\[1\] of shape \(2,\) is torch.int32, which cannot be quantized"
    ):
        allreduce_quantized([torch.zeros(2), torch.zeros(2, dtype=torch.int32)], ReduceOp.SUM, group)
    with pytest.raises(ValueError, match=r"tensors of shape .* is torch.float64"):
        allreduce_quantized([torch.zeros(2).double()], ReduceOp.SUM, group)
    with pytest.raises(ValueError, match=r"tensors\[1\]=3: allowed are tensors"):
        allreduce_quantized([torch.zeros(2), 3], ReduceOp.SUM, group)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"reduce_op=MAX: .*SUM and AVG"):
        allreduce_quantized([torch.zeros(2)], options(ReduceOp.MAX), group)
    with pytest.raises(ValueError, match=r"output of shape .* has 3 elements: .* need 4"):
        reduce_scatter_quantized(torch.zeros(3), [torch.zeros(4)], ReduceOp.SUM, group)
    with pytest.raises(ValueError, match=r"output of shape .* is torch.int64"):
        reduce_scatter_quantized(torch.zeros(4, dtype=torch.int64), [torch.zeros(4)], ReduceOp.SUM, group)


def test_padded_sizes() -> None:
    tensors = [torch.zeros(10), torch.zeros(3, 5), torch.zeros(8, 2, 3), torch.zeros(0)]
    assert get_padded_sizes(tensors, 4) == [(12, 1), (4, 5), (8, 2, 3), (0, 1)]
    output, _ = allocate_reduce_scatter_output(tensors, 4)
    assert output.shape == (3 + 5 + 12,)
    with pytest.raises(ValueError, match=r"tensors\[0\] has no dimension"):
        get_padded_sizes([torch.tensor(1.0)], 2)
    with pytest.raises(ValueError, match="world_size=0"):
        get_padded_sizes(tensors, 0)
    with pytest.raises(ValueError, match=r"torch.float16 on cpu and torch.float32 on cpu: one dtype"):
        allocate_reduce_scatter_output([torch.zeros(1), torch.zeros(1).half()], 2)
    with pytest.raises(ValueError, match="tensors is empty"):
        allocate_reduce_scatter_output([], 2)
