"""Requirements for every process group; `backends` lists the groups.

The peers are made once per backend and shared by all tests here, which must not break them; tests that break
peers are in test_base.py. For a wrapper, tests of the wrapped group's operations are marked slow.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ReduceOp, TCPStore, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from tests.unit.process_group.peers import Peers, check, runs_with, values
from tests.unit.process_group.ranks import TIMEOUT, in_threads, on_ranks
from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroup, create_store_client


def finish(work: Work) -> Any:
    """Waits for an operation and for its future. Returns the future's value."""
    work.wait()
    return work.get_future().wait()


def same_storage(got: Any, tensors: Sequence[torch.Tensor]) -> bool:
    return [t.data_ptr() for t in got] == [t.data_ptr() for t in tensors]


REDUCTIONS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": (ReduceOp.SUM, lambda all: all.sum(0)),
    "product": (ReduceOp.PRODUCT, lambda all: all.prod(0)),
    "min": (ReduceOp.MIN, lambda all: all.amin(0)),
    "max": (ReduceOp.MAX, lambda all: all.amax(0)),
}


def reduced(peers: Peers, how: str, **kind: Any) -> torch.Tensor:
    return REDUCTIONS[how][1](torch.stack([values(rank, **kind) for rank in range(peers.n)])).to(
        values(0, **kind).dtype
    )


# State


def test_it_is_a_process_group_of_pytorch(peers: Peers) -> None:
    for rank, group in enumerate(peers.groups):
        assert isinstance(group, dist.ProcessGroup)
        assert isinstance(group.getBackendName(), str) and group.getBackendName()
        assert (group.size(), group.rank()) == (peers.n, rank)
        # As PyTorch's C++ code calls them
        assert dist.ProcessGroup.size(group) == peers.n
        assert dist.ProcessGroup.rank(group) == rank
        assert group.errored() is None
        assert group.supports_reconfigure


# Collectives


@pytest.mark.parametrize("how", REDUCTIONS)
@pytest.mark.parametrize("bare", [True, False], ids=["op", "options"])
def test_allreduce(peers: Peers, how: str, bare: bool) -> None:
    opts: Any = REDUCTIONS[how][0]
    if not bare:
        opts = AllreduceOptions()
        opts.reduceOp = REDUCTIONS[how][0]

    def call(group: ProcessGroup, rank: int) -> None:
        tensor = values(rank)
        got = finish(group.allreduce([tensor], opts))
        torch.testing.assert_close(tensor, reduced(peers, how))
        assert same_storage(got, [tensor])

    peers.run(call)


@runs_with("peers", wrappers=())
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4), (10_000,)], ids=str)
def test_allreduce_of_all_kinds(peers: Peers, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def call(group: ProcessGroup, rank: int) -> None:
        tensor = values(rank, shape=shape, dtype=dtype)
        group.allreduce([tensor], ReduceOp.MAX).wait()
        assert torch.equal(tensor, reduced(peers, "max", shape=shape, dtype=dtype))

    peers.run(call)


def test_allreduce_through_pytorch(peers: Peers) -> None:
    """Calls the C++ method, as the reducer of DDP does."""

    def call(group: ProcessGroup, rank: int) -> None:
        tensor = values(rank)
        got = finish(dist.ProcessGroup.allreduce(group, [tensor]))
        torch.testing.assert_close(tensor, reduced(peers, "sum"))
        assert same_storage(got, [tensor])

    peers.run(call)


@pytest.mark.parametrize("kind", ["op", "options", "coalesced options"])
def test_allreduce_coalesced(peers: Peers, kind: str) -> None:
    opts: Any = {
        "op": ReduceOp.SUM,
        "options": AllreduceOptions(),
        "coalesced options": AllreduceCoalescedOptions(),
    }[kind]

    def call(group: ProcessGroup, rank: int) -> None:
        tensors = [values(rank), values(rank, shape=(2, 3))]
        finish(group.allreduce_coalesced(tensors, opts))
        torch.testing.assert_close(tensors, [reduced(peers, "sum"), reduced(peers, "sum", shape=(2, 3))])

    peers.run(call)


def test_allgather(peers: Peers) -> None:
    def call(group: ProcessGroup, rank: int) -> None:
        outputs = [torch.zeros(4) for _ in range(peers.n)]
        got = finish(group.allgather([outputs], [values(rank)], AllgatherOptions()))
        torch.testing.assert_close(outputs, [values(r) for r in range(peers.n)])
        assert same_storage(got[0] if isinstance(got[0], list) else got, outputs)

    peers.run(call)


def test_allgather_into_tensor_coalesced(peers: Peers) -> None:
    def call(group: ProcessGroup, rank: int) -> None:
        output = torch.zeros(4 * peers.n)
        finish(group.allgather_into_tensor_coalesced([output], [values(rank)], AllgatherOptions()))
        torch.testing.assert_close(output, torch.cat([values(r) for r in range(peers.n)]))

    peers.run(call)


def test_alltoall_base(peers: Peers) -> None:
    def call(group: ProcessGroup, rank: int) -> None:
        inputs, output = values(rank, shape=(2 * peers.n,)), torch.zeros(2 * peers.n)
        finish(group.alltoall_base(output, inputs, [], [], AllToAllOptions()))
        mine = slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(
            output, torch.cat([values(r, shape=(2 * peers.n,))[mine] for r in range(peers.n)])
        )

    peers.run(call)


@runs_with("peers", wrappers=())
def test_alltoall_base_of_unequal_slices(peers: Peers) -> None:
    """Rank r gets r + 1 elements from each rank."""
    sizes = [r + 1 for r in range(peers.n)]

    def call(group: ProcessGroup, rank: int) -> None:
        inputs, output = values(rank, shape=(sum(sizes),)), torch.zeros(peers.n * sizes[rank])
        finish(group.alltoall_base(output, inputs, [sizes[rank]] * peers.n, sizes, AllToAllOptions()))
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        torch.testing.assert_close(
            output, torch.cat([values(r, shape=(sum(sizes),))[mine] for r in range(peers.n)])
        )

    peers.run(call)


def test_broadcast(peers: Peers) -> None:
    root = peers.n - 1

    def call(group: ProcessGroup, rank: int) -> None:
        tensor, other = values(rank), values(rank)
        opts = BroadcastOptions()
        opts.rootRank = root
        got = finish(group.broadcast([tensor], opts))
        finish(group.broadcast_one(other, root))
        torch.testing.assert_close([tensor, other], [values(root), values(root)])
        assert same_storage(got, [tensor])

    peers.run(call)


SHAPES = [(1,), (3, 5), (2, 3, 4), (10_000,), (0,)]


@runs_with("peers", alone=False, wrappers=())
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_operations_that_move_tensors_move_all_dtypes(peers: Peers, dtype: torch.dtype) -> None:
    """The results are compared with plain copies."""

    def call(group: Any, rank: int) -> None:
        for shape in SHAPES:
            everything = [values(r, shape=shape, dtype=dtype) for r in range(peers.n)]
            mine = everything[rank]
            outputs = [torch.zeros(shape, dtype=dtype) for _ in everything]
            group.allgather([outputs], [mine], AllgatherOptions()).wait()
            assert all(torch.equal(a, b) for a, b in zip(outputs, everything))

            tensor = mine.clone()
            group.broadcast_one(tensor, 1).wait()
            assert torch.equal(tensor, everything[1])

            rows = torch.stack([mine.reshape(-1)] * peers.n)
            got = torch.zeros_like(rows)
            group.alltoall_base(got.view(-1), rows.view(-1), [], [], AllToAllOptions()).wait()
            assert torch.equal(got, torch.stack([tensor.reshape(-1) for tensor in everything]))

            joined = torch.zeros(peers.n * mine.numel(), dtype=dtype)
            group._allgather_base(joined, mine.reshape(-1), AllgatherOptions()).wait()
            assert torch.equal(joined, torch.cat([tensor.reshape(-1) for tensor in everything]))

    peers.run(call)


def test_barrier(peers: Peers) -> None:
    peers.run(lambda group, rank: group.barrier(BarrierOptions()).wait())


@runs_with("peers", alone=False)
def test_send_and_recv(peers: Peers) -> None:
    """A ring, in both directions at once, distinguished by the tag."""

    def call(group: ProcessGroup, rank: int) -> None:
        after, before = (rank + 1) % peers.n, (rank - 1) % peers.n
        from_before, from_after = torch.zeros(4), torch.zeros(4)
        works = [
            group.send([values(rank)], after, 1),
            group.send([-values(rank)], before, 2),
            group.recv([from_after], after, 2),
            group.recv([from_before], before, 1),
        ]
        for work in works:
            work.wait()
        torch.testing.assert_close([from_before, from_after], [values(before), -values(after)])

    peers.run(call)


def test_reduce_scatter(peers: Peers) -> None:
    """If it is not supported, every rank gets an error at once."""

    def call(group: ProcessGroup, rank: int) -> None:
        inputs = [values(r) for r in range(peers.n)]
        output = torch.zeros(4)
        several = torch.zeros(4)
        calls = [
            lambda: group.reduce_scatter([output], [inputs], ReduceScatterOptions()),
            lambda: group.reduce_scatter_tensor_coalesced(
                [several], [torch.cat(inputs)], ReduceScatterOptions()
            ),
        ]
        if not peers.backend.reduces_and_scatters:
            with pytest.raises(RuntimeError, match="does not support reduce_scatter"):
                calls[0]()
            return  # Gloo of PyTorch 2.7 has no single-tensor form
        for run in calls:
            finish(run())
        torch.testing.assert_close([output, several], [peers.n * values(rank)] * 2)

    peers.run(call)


@runs_with("peers", alone=False)  # a dummy has only torchft's operations
def test_further_operations_of_pytorch(peers: Peers) -> None:
    def call(group: Any, rank: int) -> None:
        everything = [values(r) for r in range(peers.n)]

        tensor, opts = values(rank), ReduceOptions()
        opts.rootRank = 1
        group.reduce([tensor], opts).wait()
        if rank == 1:
            torch.testing.assert_close(tensor, reduced(peers, "sum"))

        gathered, gather = [torch.zeros(4) for _ in everything], GatherOptions()
        group.gather([gathered] if rank == 0 else [], [values(rank)], gather).wait()
        if rank == 0:
            torch.testing.assert_close(gathered, everything)

        mine = torch.zeros(4)
        group.scatter([mine], [everything] if rank == 0 else [], ScatterOptions()).wait()
        torch.testing.assert_close(mine, values(rank))

        joined = torch.zeros(4 * peers.n)
        group._allgather_base(joined, values(rank), AllgatherOptions()).wait()
        torch.testing.assert_close(joined, torch.cat(everything))

    peers.run(call)


# Order


@runs_with("peers", alone=False, wrappers=())
def test_two_threads_use_a_group(peers: Peers) -> None:
    """Collectives need the same order on all ranks, so the threads start them under a lock."""

    def call(group: ProcessGroup, rank: int) -> None:
        def ring(tag: int) -> None:
            for i in range(5):
                received = torch.zeros(4)
                sent = group.send([values(rank) * i + tag], (rank + 1) % peers.n, tag)
                group.recv([received], (rank - 1) % peers.n, tag).wait()
                sent.wait()
                torch.testing.assert_close(received, values((rank - 1) % peers.n) * i + tag)

        def reduce() -> None:
            for _ in range(5):
                tensor = values(rank)
                group.allreduce([tensor], ReduceOp.SUM).wait()
                torch.testing.assert_close(tensor, reduced(peers, "sum"))

        results = in_threads([lambda: ring(1), lambda: ring(2), reduce])
        assert results == [None, None, None]

    peers.run(call)


@runs_with("peers", wrappers=())
def test_several_operations_in_flight(peers: Peers) -> None:
    def call(group: ProcessGroup, rank: int) -> None:
        tensors = [values(rank) * i for i in range(20)]
        works = [group.allreduce([tensor], ReduceOp.SUM) for tensor in tensors]
        for i, work in reversed(list(enumerate(works))):
            work.wait()
            torch.testing.assert_close(tensors[i], reduced(peers, "sum") * i)

    peers.run(call)


def test_futures_can_be_chained(peers: Peers) -> None:
    def call(group: ProcessGroup, rank: int) -> None:
        tensor = values(rank)
        fut = group.allreduce([tensor], ReduceOp.SUM).get_future()
        torch.testing.assert_close(fut.then(lambda f: f.value()[0] * 2).wait(), 2 * reduced(peers, "sum"))

    peers.run(call)


# Bad input


@runs_with("peers", alone=False)  # a dummy group refuses nothing
def test_unsupported_operations_are_named_at_once_on_every_rank(peers: Peers) -> None:
    """Operations in flight, before and after it, are not affected."""

    def call(group: ProcessGroup, rank: int) -> str:
        before, after = values(rank), values(rank)
        first = group.allreduce([before], ReduceOp.SUM)
        with pytest.raises(RuntimeError) as refused:
            group.broadcast_one(torch.ones(4, dtype=torch.int16), 0).wait()
        second = group.allreduce([after], ReduceOp.SUM)
        first.wait()
        second.wait()
        torch.testing.assert_close([before, after], [reduced(peers, "sum")] * 2)
        return str(refused.value)

    for text in peers.run(call):
        assert "Invalid scalar type" in text
        assert (
            f"{peers.groups[0].getBackendName()} does not support broadcast of torch.int16 on cpu" in text
            or ("gloo does not support broadcast of torch.int16 on cpu" in text)
        )


@runs_with("peers", alone=False)
def test_a_tensor_without_memory_is_refused_on_every_rank(peers: Peers) -> None:
    """PyTorch's groups return without reducing it, while the peers of such a rank wait."""

    def call(group: ProcessGroup, rank: int) -> None:
        with pytest.raises((ValueError, RuntimeError), match="meta"):
            group.broadcast_one(torch.ones(4, device="meta"), 0).wait()
        if not isinstance(group, ErrorSwallowingProcessGroupWrapper):
            with pytest.raises((ValueError, RuntimeError), match="meta"):
                group.allreduce([torch.ones(4, device="meta")], ReduceOp.SUM).wait()
        tensor = values(rank)
        group.allreduce([tensor], ReduceOp.SUM).wait()
        torch.testing.assert_close(tensor, reduced(peers, "sum"))

    peers.run(call)


def _rooted(root: int) -> BroadcastOptions:
    opts = BroadcastOptions()
    opts.rootRank = root
    return opts


# Mistakes of users. PyTorch's Gloo raises all these errors in the call.
MISTAKES: dict[str, Callable[[Any, int], Work]] = {
    "sizes that do not fit": lambda group, n: group.allgather(
        [[torch.zeros(3) for _ in range(n)]], [torch.ones(2)], AllgatherOptions()
    ),
    "too few outputs": lambda group, n: group.allgather(
        [[torch.zeros(2)]], [torch.ones(2)], AllgatherOptions()
    ),
    "no tensor": lambda group, n: group.broadcast([], BroadcastOptions()),
    "two tensors to receive": lambda group, n: group.recv([torch.ones(1), torch.ones(1)], 0, 0),
    "dtypes that do not fit": lambda group, n: group.allgather(
        [[torch.zeros(2, dtype=torch.int32) for _ in range(n)]], [torch.ones(2)], AllgatherOptions()
    ),
    "bits of floats": lambda group, n: group.allreduce_coalesced([torch.ones(2)], ReduceOp.BAND),
    "gaps in the input": lambda group, n: group.send([torch.ones(2, 3)[:, ::2]], (group.rank() + 1) % n, 9),
    "gaps in the output": lambda group, n: group.recv([torch.ones(2, 3)[:, ::2]], (group.rank() + 1) % n, 9),
    "an invalid root": lambda group, n: group.broadcast([torch.ones(2)], _rooted(99)),
    "slices that do not fit": lambda group, n: group.alltoall_base(
        torch.ones(5), torch.ones(4), [4, 0, 0], [4, 0, 0], AllToAllOptions()
    ),
}


# A wrapper might turn these into other errors.
FORWARDED = ["too few outputs", "bits of floats"]


@runs_with("peers", alone=False)
@pytest.mark.parametrize("mistake", FORWARDED)
def test_a_mistake_raises_the_error_of_pytorch_through_a_wrapper(peers: Peers, mistake: str) -> None:
    _raises_the_error_of_pytorch(peers, mistake)


@runs_with("peers", alone=False, wrappers=())
@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake not in FORWARDED])
def test_a_mistake_raises_the_error_of_pytorch(peers: Peers, mistake: str) -> None:
    _raises_the_error_of_pytorch(peers, mistake)


def _raises_the_error_of_pytorch(peers: Peers, mistake: str) -> None:
    plain = _plain_group(peers.store)

    def error_of(group: Any) -> str:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as refused:
            MISTAKES[mistake](group, group.size()).wait()
        return str(refused.value).partition("\n")[0]

    # PyTorch's reduce_scatter and allreduce_coalesced require options; torchft's also accept a plain
    # reduction.
    expected = None if mistake == "bits of floats" else error_of(plain)
    texts = peers.run(lambda group, rank: error_of(group))
    if expected is not None and peers.n == plain.size():
        assert all(_words(expected) in _words(text) for text in texts), (expected, texts)
    peers.run(lambda group, rank: check(group, rank, peers.n))


def _words(text: str) -> str:
    return text.removeprefix("ProcessGroupGloo::").strip()


_plain: list[dist.ProcessGroup] = []


def _plain_group(store: TCPStore) -> dist.ProcessGroup:
    """Rank 0 of PyTorch's own group of three."""
    if not _plain:
        prefix = PrefixStore("plain", store)

        def make(rank: int) -> dist.ProcessGroup:
            group = dist.ProcessGroup(prefix, rank, 3)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            backend = dist.ProcessGroupGloo(
                PrefixStore("plain", create_store_client(f"localhost:{store.port}", TIMEOUT)),
                rank,
                3,
                timeout=TIMEOUT,
            )
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            return group

        _plain.extend(on_ranks(3, make))
    return _plain[0]
