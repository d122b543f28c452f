"""TORCHFT_CHECK_COLLECTIVES=1: if ranks call different collectives, all ranks report the rank that
differs.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
)

from tests.unit.flickering import cleared_after_each_look
from tests.unit.process_group.backends import Backend, backends
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, on_ranks
from torchft.process_group import ProcessGroup, ProcessGroupGloo
from torchft.process_group.checked import CHECK_COLLECTIVES, Checker, describe, enabled, first_difference


def checked(wrappers: Sequence[str] | None = None) -> list[Any]:
    """The backends whose collectives are checked, as parameters of a fixture."""
    found = []
    for param in backends(alone=False, wrappers=wrappers):
        (backend,) = param.values
        if backend.checked and not backend.swallows and backend.missing is None:
            found.append(param)
    return found


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_COLLECTIVES, "1")


@pytest.fixture(params=checked())
def groups(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[list[ProcessGroup]]:
    backend: Backend = request.param
    groups = [backend.make(store, rank) for rank in range(backend.world_size)]
    connect(groups, store)
    yield groups
    for group in groups:
        group.shutdown()


Call = Callable[[Any], dist.Work]


def rooted(root: int) -> BroadcastOptions:
    opts = BroadcastOptions()
    opts.rootRank = root
    return opts


def test_an_abort_on_another_thread_may_remove_the_checker_of_a_call(groups: list[ProcessGroup]) -> None:
    for group in groups:
        group.__class__ = cleared_after_each_look(type(group), "_checker")
    tensors = [torch.full((1,), float(rank + 1)) for rank in range(len(groups))]
    on_ranks(len(groups), lambda rank: groups[rank].broadcast([tensors[rank]], rooted(0)).wait())
    assert [tensor.item() for tensor in tensors] == [1.0] * len(groups)


DIFFERENCES: dict[str, tuple[Call, Call, list[str]]] = {
    "operation": (
        lambda group: group.allreduce([torch.ones(4)], ReduceOp.SUM),
        lambda group: group.broadcast([torch.ones(4)], rooted(0)),
        ["rank 0 calls allreduce(float32[4]; op SUM) at ", "rank 1 calls broadcast(float32[4]; root 0) at "],
    ),
    "size": (  # unchecked, Gloo ends the process
        lambda group: group.allreduce([torch.ones(4)], ReduceOp.SUM),
        lambda group: group.allreduce([torch.ones(5)], ReduceOp.SUM),
        ["float32[4]", "float32[5]"],
    ),
    "dtype": (
        lambda group: group.allreduce([torch.ones(4)], ReduceOp.SUM),
        lambda group: group.allreduce([torch.ones(4, dtype=torch.int32)], ReduceOp.SUM),
        ["float32[4]", "int32[4]"],
    ),
    "reduction": (
        lambda group: group.allreduce([torch.ones(4)], ReduceOp.SUM),
        lambda group: group.allreduce([torch.ones(4)], ReduceOp.MAX),
        ["op SUM", "op MAX"],
    ),
    "root": (
        lambda group: group.broadcast([torch.ones(4)], rooted(0)),
        lambda group: group.broadcast([torch.ones(4)], rooted(1)),
        ["root 0", "root 1"],
    ),
}


def test_a_collective_that_differs_is_named_on_all_ranks(groups: list[ProcessGroup]) -> None:
    check_difference(groups, "operation")


@pytest.mark.parametrize("groups", checked(wrappers=()), indirect=True)
@pytest.mark.parametrize("what", [what for what in DIFFERENCES if what != "operation"])
def test_all_properties_of_a_collective_are_compared(groups: list[ProcessGroup], what: str) -> None:
    check_difference(groups, what)


def check_difference(groups: list[ProcessGroup], what: str) -> None:
    right, wrong, named = DIFFERENCES[what]
    on_ranks(len(groups), lambda rank: groups[rank].barrier(BarrierOptions()).wait())

    def differ(rank: int) -> object:
        return (wrong if rank == 1 else right)(groups[rank]).wait()

    results = in_threads([lambda rank=rank: differ(rank) for rank in range(len(groups))])
    assert len({str(result) for result in results}) == 1
    assert all(isinstance(result, RuntimeError) for result in results)
    for text in ["collective 1 differs", *named, ".py:"]:
        assert text in str(results[0])
    # After that every call fails with the same error.
    again = in_threads([lambda group=group: right(group).wait() for group in groups])
    assert [str(result) for result in again] == [str(results[0])] * len(groups)


def test_equal_collectives_pass(groups: list[ProcessGroup], store: TCPStore) -> None:
    def call(rank: int) -> None:
        group: Any = groups[rank]
        for _ in range(3):
            tensor = torch.full((4,), float(rank))
            group.allreduce([tensor], ReduceOp.SUM).wait()
            assert tensor[0].item() == sum(range(len(groups)))
        sizes = [r + 1 for r in range(len(groups))]  # may differ from rank to rank
        group.alltoall_base(
            torch.zeros(len(groups) * sizes[rank]),
            torch.zeros(sum(sizes)),
            [sizes[rank]] * len(groups),
            sizes,
            AllToAllOptions(),
        ).wait()
        opts = AllgatherOptions()
        group.allgather([[torch.zeros(2) for _ in groups]], [torch.ones(2)], opts).wait()
        if rank == 0:
            group.send([torch.ones(1)], 1, 0).wait()
        elif rank == 1:
            group.recv([torch.zeros(1)], 0, 0).wait()

    for _ in range(2):
        on_ranks(len(groups), call)
        connect(groups, store)


def test_a_rank_that_does_not_call_is_named(store: TCPStore) -> None:
    results: list[Any] = []
    for seconds in (0.5, 5, 25):  # longer if one of the two others called too late
        groups = [ProcessGroupGloo(timeout=timedelta(seconds=seconds)) for _ in range(3)]
        connect(groups, store)
        results = in_threads(
            [lambda group=group: group.barrier().wait() for group in groups[:2]], 2 * TIMEOUT
        )
        for group in groups:
            group.shutdown()
        if all(f"of the ranks [2] none came in {seconds} s" in str(result) for result in results):
            break
    else:
        raise AssertionError(results)
    assert "rank 0 calls barrier() as collective 0" in str(results[0])


def test_an_abort_ends_the_wait_for_the_others(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(groups, store)

    def abort() -> None:
        checker = groups[0]._checker
        assert checker is not None
        while checker._calls == 0:
            time.sleep(0.001)
        groups[0].abort()

    results = in_threads([lambda: groups[0].barrier().wait(), abort], timedelta(seconds=5))
    assert "was aborted" in str(results[0])
    groups[1].shutdown()


def test_off_is_the_default(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0"):
        monkeypatch.setenv(CHECK_COLLECTIVES, value)
        assert not enabled()
    monkeypatch.delenv(CHECK_COLLECTIVES)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    connect([group], store)
    assert group._checker is None
    group.shutdown()


def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_COLLECTIVES, "yes")
    with pytest.raises(ValueError, match=r"TORCHFT_CHECK_COLLECTIVES='yes': allowed are 0 \(off\) and 1"):
        enabled()


def test_descriptions() -> None:
    four, opts = torch.ones(4), AllreduceOptions()
    opts.reduceOp = ReduceOp.MIN
    assert describe("allreduce", ([four, torch.ones(2, 3, dtype=torch.int64)],), opts) == (
        "allreduce(float32[4], int64[2, 3]; op MIN)"
    )
    assert describe("barrier", (), BarrierOptions()) == "barrier()"
    # Only the root passes lists.
    root = describe("gather", ([[four, four]], [four]), GatherOptions())
    assert root == describe("gather", ([], [four]), GatherOptions()) == "gather(float32[4]; root 0)"
    assert (
        describe("alltoall_base", (four, torch.ones(7), [4], [7]), AllToAllOptions())
        == "alltoall_base(float32)"
    )
    assert describe("send", ([four], 1, 0), None) is None
    many, other = [four] * 20, [*[four] * 19, torch.ones(5)]
    assert "20 tensors" in str(describe("allreduce", (many,), ReduceOp.SUM))
    assert describe("allreduce", (many,), ReduceOp.SUM) != describe("allreduce", (other,), ReduceOp.SUM)


def test_the_place_of_a_call_may_differ() -> None:
    assert first_difference(["barrier() at a.py:1", "barrier() at b.py:2"]) is None
    assert first_difference(["barrier()", "barrier()", "allreduce(float32[1])"]) == 2


def test_nothing_is_left_in_the_store() -> None:
    store = dist.HashStore()
    checker = Checker("group", store, 0, 1, TIMEOUT)
    for _ in range(5):
        checker.check("barrier", (), BarrierOptions())
    assert not store.check(["3/0"]) and store.check(["4/0"])
