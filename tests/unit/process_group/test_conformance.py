"""What every group must do; `backends` says which groups there are.

The peers are made once per backend and used by all tests that leave them whole. A wrapper has all tests of what it does
itself; those of how the group in it moves and reduces tensors are slow for it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable, Iterator, Sequence

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

from tests.unit.process_group.backends import Backend, backends
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroup, create_store_client


class Peers:
    """The ranks of one group."""

    def __init__(self, backend: Backend, store: TCPStore) -> None:
        self.backend = backend
        self.store = store
        self.n = backend.world_size
        if backend.missing is not None:
            pytest.skip(backend.missing)
        self.groups = [backend.make(store, rank) for rank in range(self.n)]

    def connect(self, groups: Sequence[ProcessGroup] | None = None) -> None:
        connect(self.groups if groups is None else groups, self.store)

    def run(self, call: Callable[[ProcessGroup, int], Any]) -> list[Any]:
        def on_device(rank: int) -> Any:
            with torch.device(self.backend.device):
                return call(self.groups[rank], rank)

        return on_ranks(self.n, on_device)

    def shutdown(self) -> None:
        for group in self.groups:
            group.shutdown()


@pytest.fixture(scope="module", params=backends())
def peers(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[Peers]:
    peers = Peers(request.param, store)
    peers.connect()
    yield peers
    peers.shutdown()


@pytest.fixture(params=backends())
def fresh(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[Peers]:
    """Peers that a test may break; not connected."""
    peers = Peers(request.param, store)
    yield peers
    peers.shutdown()


def runs_with(fixture: str, **which: Any) -> pytest.MarkDecorator:
    """What a test is for, where that is not every group: see `backends`."""
    return pytest.mark.parametrize(fixture, backends(**which), indirect=True)


def values(rank: int, shape: tuple[int, ...] = (4,), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that differs from rank to rank and from element to element."""
    n = torch.Size(shape).numel()
    return (torch.arange(n, dtype=torch.float64) + 10 * (rank + 1)).reshape(shape).to(dtype)


def finish(work: Work) -> Any:
    """Waits for an operation both ways; what its future gives."""
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


# The state


def test_it_is_a_process_group_of_pytorch(peers: Peers) -> None:
    for rank, group in enumerate(peers.groups):
        assert isinstance(group, dist.ProcessGroup)
        assert isinstance(group.getBackendName(), str) and group.getBackendName()
        assert (group.size(), group.rank()) == (peers.n, rank)
        # What PyTorch's C++ code sees
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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4), (10_000,)], ids=str)
def test_allreduce_of_all_kinds(peers: Peers, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def call(group: ProcessGroup, rank: int) -> None:
        tensor = values(rank, shape=shape, dtype=dtype)
        group.allreduce([tensor], ReduceOp.MAX).wait()
        assert torch.equal(tensor, reduced(peers, "max", shape=shape, dtype=dtype))

    peers.run(call)


def test_allreduce_through_pytorch(peers: Peers) -> None:
    """As DDP's reducer calls it, from C++."""

    def call(group: ProcessGroup, rank: int) -> None:
        tensor = values(rank)
        got = finish(dist.ProcessGroup.allreduce(group, [tensor]))
        torch.testing.assert_close(tensor, reduced(peers, "sum"))
        assert same_storage(got, [tensor])

    peers.run(call)


@pytest.mark.parametrize("kind", ["op", "options", "coalesced options"])
def test_allreduce_coalesced(peers: Peers, kind: str) -> None:
    opts: Any = {"op": ReduceOp.SUM, "options": AllreduceOptions(), "coalesced options": AllreduceCoalescedOptions()}[
        kind
    ]

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
        torch.testing.assert_close(output, torch.cat([values(r, shape=(2 * peers.n,))[mine] for r in range(peers.n)]))

    peers.run(call)


@runs_with("peers", wrappers=())
def test_alltoall_base_of_unequal_slices(peers: Peers) -> None:
    """Rank r gets r + 1 elements from everybody."""
    sizes = [r + 1 for r in range(peers.n)]

    def call(group: ProcessGroup, rank: int) -> None:
        inputs, output = values(rank, shape=(sum(sizes),)), torch.zeros(peers.n * sizes[rank])
        finish(group.alltoall_base(output, inputs, [sizes[rank]] * peers.n, sizes, AllToAllOptions()))
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        torch.testing.assert_close(output, torch.cat([values(r, shape=(sum(sizes),))[mine] for r in range(peers.n)]))

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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_what_moves_tensors_moves_all_kinds(peers: Peers, dtype: torch.dtype) -> None:
    """Against plain copies."""

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
    """A ring, in both directions at once, told apart by the tag."""

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
    """Where it is missing, every rank hears of it at once."""

    def call(group: ProcessGroup, rank: int) -> None:
        inputs = [values(r) for r in range(peers.n)]
        output = torch.zeros(4)
        several = torch.zeros(4)
        calls = [
            lambda: group.reduce_scatter([output], [inputs], ReduceScatterOptions()),
            lambda: group.reduce_scatter_tensor_coalesced([several], [torch.cat(inputs)], ReduceScatterOptions()),
        ]
        if not peers.backend.reduces_and_scatters:
            with pytest.raises(RuntimeError, match="does not support reduce_scatter"):
                calls[0]()
            return  # Gloo of PyTorch 2.7 has the other one
        for run in calls:
            finish(run())
        torch.testing.assert_close([output, several], [peers.n * values(rank)] * 2)

    peers.run(call)


@runs_with("peers", alone=False)  # a dummy has only torchft's operations
def test_what_pytorch_calls_besides(peers: Peers) -> None:
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
    """Each for itself: collectives need one order on all ranks, so they are started under a lock."""

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


# New peers


def check(group: ProcessGroup, rank: int, n: int) -> None:
    """That the group works, with these peers."""
    assert (group.size(), group.rank()) == (n, rank)
    tensor = torch.tensor([2.0**rank])
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.item() == 2.0**n - 1


@runs_with("fresh", wrappers=())
def test_fewer_and_more_and_other_ranks(fresh: Peers) -> None:
    for members in ([0, 1, 2], [2, 0], [1, 2, 0], [1], [0, 1]):
        groups = [fresh.groups[m] for m in members if m < fresh.n]
        if not groups:
            continue
        fresh.connect(groups)
        on_ranks(len(groups), lambda rank, groups=groups: check(groups[rank], rank, len(groups)))


@runs_with("fresh", native=False)  # a native group has none
def test_configure(fresh: Peers) -> None:
    for _ in range(2):
        where = meeting(fresh.store)
        fresh.run(
            lambda group, rank, where=where: group.configure(where, f"replica_{rank}", rank, fresh.n, 7, 0, 1, [0])
        )
        fresh.run(lambda group, rank: check(group, rank, fresh.n))


@runs_with("fresh", native=False)  # a native group has a new handle for every set of peers
def test_the_handle_stays(fresh: Peers) -> None:
    group = fresh.groups[0]
    group.set_rank_info("replica", 0, 1, 3)
    handle = group.get_reconfigure_handle()
    assert '"global_rank": 3' in handle
    fresh.connect()
    assert group.get_reconfigure_handle() == handle
    if hasattr(dist.ProcessGroup, "get_reconfigure_handle"):  # PyTorch >= 2.14
        assert dist.ProcessGroup.get_reconfigure_handle(group) == handle  # from C++


def test_shutdown_and_abort_at_any_time(fresh: Peers) -> None:
    for group in fresh.groups:
        group.abort()
        group.shutdown()
    fresh.connect()
    for group in fresh.groups:
        group.abort()
        group.abort()
        group.shutdown()
        group.shutdown()
    fresh.connect()
    fresh.run(lambda group, rank: check(group, rank, fresh.n))


@runs_with("peers", alone=False)  # one that does nothing refuses nothing
def test_what_is_not_supported_is_named_at_once_on_every_rank(peers: Peers) -> None:
    """And what is in flight, before it and after it, is not touched."""

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
        assert f"{peers.groups[0].getBackendName()} does not support broadcast of torch.int16 on cpu" in text or (
            "gloo does not support broadcast of torch.int16 on cpu" in text
        )


@runs_with("peers", alone=False)
def test_a_tensor_without_memory_is_refused_on_every_rank(peers: Peers) -> None:
    """PyTorch's groups say that they have reduced it, and the peers of one such rank wait."""

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


# What users get wrong. PyTorch's Gloo says all of this in the call.
MISTAKES: dict[str, Callable[[Any, int], Work]] = {
    "sizes that do not fit": lambda group, n: group.allgather(
        [[torch.zeros(3) for _ in range(n)]], [torch.ones(2)], AllgatherOptions()
    ),
    "too few outputs": lambda group, n: group.allgather([[torch.zeros(2)]], [torch.ones(2)], AllgatherOptions()),
    "no tensor": lambda group, n: group.broadcast([], BroadcastOptions()),
    "two tensors to receive": lambda group, n: group.recv([torch.ones(1), torch.ones(1)], 0, 0),
    "dtypes that do not fit": lambda group, n: group.allgather(
        [[torch.zeros(2, dtype=torch.int32) for _ in range(n)]], [torch.ones(2)], AllgatherOptions()
    ),
    "bits of floats": lambda group, n: group.allreduce_coalesced([torch.ones(2)], ReduceOp.BAND),
    "gaps in what is sent": lambda group, n: group.send([torch.ones(2, 3)[:, ::2]], (group.rank() + 1) % n, 9),
    "gaps in what is received": lambda group, n: group.recv([torch.ones(2, 3)[:, ::2]], (group.rank() + 1) % n, 9),
    "a root that is none": lambda group, n: group.broadcast([torch.ones(2)], _rooted(99)),
    "slices that do not fit": lambda group, n: group.alltoall_base(
        torch.ones(5), torch.ones(4), [4, 0, 0], [4, 0, 0], AllToAllOptions()
    ),
}


# Of these a wrapper could make something else.
FORWARDED = ["too few outputs", "bits of floats"]


@runs_with("peers", alone=False)
@pytest.mark.parametrize("mistake", FORWARDED)
def test_what_pytorch_says_of_a_mistake_in_a_call(peers: Peers, mistake: str) -> None:
    _says_what_pytorch_says(peers, mistake)


@runs_with("peers", alone=False, wrappers=())
@pytest.mark.parametrize("mistake", [mistake for mistake in MISTAKES if mistake not in FORWARDED])
def test_what_pytorch_says_of_a_mistake(peers: Peers, mistake: str) -> None:
    _says_what_pytorch_says(peers, mistake)


def _says_what_pytorch_says(peers: Peers, mistake: str) -> None:
    plain = _plain_group(peers.store)

    def said(group: Any) -> str:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as refused:
            MISTAKES[mistake](group, group.size()).wait()
        return str(refused.value).partition("\n")[0]

    # PyTorch's reduce_scatter and allreduce_coalesced take no bare reduction: only ours turns it into options.
    expected = None if mistake == "bits of floats" else said(plain)
    texts = peers.run(lambda group, rank: said(group))
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
                PrefixStore("plain", create_store_client(f"localhost:{store.port}", TIMEOUT)), rank, 3, timeout=TIMEOUT
            )
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            return group

        _plain.extend(on_ranks(3, make))
    return _plain[0]


@runs_with("fresh", alone=False, native=False)  # a native group belongs to its maker, a dummy does nothing
def test_calls_after_shutdown(fresh: Peers) -> None:
    fresh.connect()
    for group in fresh.groups:
        group.shutdown()
        with pytest.raises((AssertionError, RuntimeError, OSError), match=r"not initialized|shut down|no peers"):
            group.broadcast_one(torch.ones(1), 0).wait()
        group.set_timeout(TIMEOUT)
        assert group.errored() is None
    fresh.connect()
    fresh.run(lambda group, rank: check(group, rank, fresh.n))


@runs_with("fresh", alone=False, wrappers=("managed", "error_swallowing"))
def test_a_peer_that_leaves_is_an_error_for_the_rest(fresh: Peers) -> None:
    fresh.connect()
    gone = fresh.groups[2]
    works = [fresh.groups[rank].broadcast_one(values(rank), 2) for rank in (0, 1)]
    gone.abort()
    results = in_threads([work.wait for work in works], TIMEOUT / 2)
    assert [type(result) for result in results] == [RuntimeError] * 2
    # The two that are left go on.
    fresh.connect(fresh.groups[:2])
    on_ranks(2, lambda rank: check(fresh.groups[rank], rank, 2))


@runs_with("fresh", alone=False)
def test_an_abort_ends_what_is_in_flight(fresh: Peers) -> None:
    """Here and at the peers; new peers make the group whole."""
    fresh.connect()
    # Rank 1 waits for rank 0, whose connection breaks; for rank 2 it would wait on.
    pending = [fresh.groups[rank].recv([values(rank)], source, 0) for rank, source in ((0, 2), (1, 0))]
    assert not any(work.is_completed() for work in pending)
    fresh.groups[0].abort()
    results = in_threads([lambda work=work: work.wait() for work in pending], TIMEOUT / 2)
    assert [type(result) for result in results] == [RuntimeError, RuntimeError]

    assert isinstance(fresh.groups[0].errored(), RuntimeError)
    fresh.connect()
    fresh.run(lambda group, rank: check(group, rank, fresh.n))
    assert fresh.groups[0].errored() is None


@runs_with("fresh", alone=False, wrappers=("managed",))
def test_timeouts(fresh: Peers) -> None:
    """Of the group, of one operation's options, and of one wait; the peers stay away each time."""
    short = timedelta(milliseconds=100)

    def of_the_group(group: ProcessGroup) -> None:
        group.set_timeout(timedelta(milliseconds=700))
        group.broadcast_one(values(0), 1).wait()

    def of_the_options(group: ProcessGroup) -> None:
        opts = AllgatherOptions()
        opts.timeout = short
        group.allgather([[torch.zeros(4) for _ in range(fresh.n)]], [values(0)], opts).wait()

    def of_the_wait(group: ProcessGroup) -> None:
        group.recv([torch.zeros(1)], 1, 0).wait(short)

    for wait in (of_the_options, of_the_wait, of_the_group):
        fresh.connect()
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            wait(fresh.groups[0])


# A native group's receive keeps the deadline it was made with.
@runs_with("fresh", alone=False, native=False, wrappers=())
def test_a_timeout_holds_for_the_next_peers_too(fresh: Peers) -> None:
    fresh.groups[0].set_timeout(timedelta(seconds=2))  # it connects within that, too: with a lost question to DNS, 1 s
    fresh.connect()
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        fresh.groups[0].recv([torch.zeros(1)], 1, 0).wait()


@runs_with("fresh", alone=False)
@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), 5], ids=str)
def test_a_bad_timeout_is_named(fresh: Peers, timeout: Any) -> None:
    with pytest.raises(ValueError, match="a timedelta above zero is needed"):
        fresh.groups[0].set_timeout(timeout)
