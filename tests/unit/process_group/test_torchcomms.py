"""ProcessGroupTorchComms over a stand-in for torchcomms with the same interface."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import threading
import types
from datetime import timedelta
from typing import Any, Callable, Iterator

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroup, supports_reconfigure
from torchft.process_group.reconfigure import options_of

OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]


_peers: dict[int, Peers] = {}


class Peers:
    """State shared by communicators that were reconfigured with the same uuid."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.lock = threading.Lock()
        self.operations: dict[int, tuple[threading.Barrier, list[Any]]] = {}

    def exchange(self, number: int, rank: int, value: Any) -> list[Any]:
        """Returns the values of all ranks for an operation."""
        with self.lock:
            barrier, values = self.operations.setdefault(number, (threading.Barrier(self.n), [None] * self.n))
        values[rank] = value
        barrier.wait(TIMEOUT.total_seconds())
        return values


class CommWork:
    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._done = False

    def wait(self) -> None:
        if not self._done:
            self._run()
        self._done = True


def reduced(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(tensors)
    return stacked.max(0).values if op == "MAX" else stacked.mean(0) if op == "AVG" else stacked.sum(0)


class Comm:
    """A communicator on a CPU. An operation begins when it is waited for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank, self.n = -1, -1
        self.uuids: list[int] = []
        self.finalized = 0

    def get_backend(self) -> str:
        return "stand-in"

    def get_device(self) -> torch.device:
        return torch.device("cpu")

    def get_init_handle(self) -> str:
        return f"handle of {self.name}"

    def get_rank(self) -> int:
        return self.rank

    def get_size(self) -> int:
        return self.n

    def reconfigure(self, uuid: int, init_handles: list[str], timeout: timedelta) -> CommWork:
        self.rank, self.n = init_handles.index(self.get_init_handle()), len(init_handles)
        self.uuids.append(uuid)
        self.operations = itertools.count()
        self.peers = _peers.setdefault(uuid, Peers(self.n))
        return CommWork(lambda: None)

    def finalize(self) -> None:
        assert self.finalized == 0, "already finalized"
        self.finalized += 1

    def _work(self, async_op: bool, value: Any, then: Callable[[list[Any]], Any]) -> CommWork:
        assert async_op
        number, rank, peers = next(self.operations), self.rank, self.peers
        return CommWork(lambda: then(peers.exchange(number, rank, value)))

    def all_reduce(self, t: torch.Tensor, op: str, async_op: bool) -> CommWork:
        return self._work(async_op, t.clone(), lambda all: t.copy_(reduced(op, all)))

    def broadcast(self, t: torch.Tensor, root: int, async_op: bool) -> CommWork:
        return self._work(async_op, t.clone(), lambda all: t.copy_(all[root]))

    def all_gather(self, outs: list[torch.Tensor], t: torch.Tensor, async_op: bool) -> CommWork:
        return self._work(async_op, t.clone(), lambda all: [out.copy_(part) for out, part in zip(outs, all)])

    def all_gather_single(self, out: torch.Tensor, t: torch.Tensor, async_op: bool) -> CommWork:
        return self._work(async_op, t.clone(), lambda all: out.copy_(torch.cat(all)))

    def reduce_scatter(
        self, out: torch.Tensor, parts: list[torch.Tensor], op: str, async_op: bool
    ) -> CommWork:
        return self._work(async_op, parts, lambda all: out.copy_(reduced(op, [p[self.rank] for p in all])))

    def reduce_scatter_single(self, out: torch.Tensor, t: torch.Tensor, op: str, async_op: bool) -> CommWork:
        return self._work(async_op, t, lambda all: out.copy_(reduced(op, all).chunk(self.n)[self.rank]))

    def all_to_all_single(self, out: torch.Tensor, t: torch.Tensor, async_op: bool) -> CommWork:
        mine = t.chunk(self.n)
        return self._work(async_op, mine, lambda all: out.copy_(torch.cat([p[self.rank] for p in all])))

    def all_to_all_v_single(
        self, out: torch.Tensor, t: torch.Tensor, outs: list[int], ins: list[int], async_op: bool
    ) -> CommWork:
        return self._work(
            async_op, t.split(ins), lambda all: out.copy_(torch.cat([p[self.rank] for p in all]))
        )

    def barrier(self, async_op: bool) -> CommWork:
        return self._work(async_op, None, lambda all: None)

    def send(self, t: torch.Tensor, dst: int, async_op: bool) -> CommWork:
        return self._work(async_op, t.clone(), lambda all: None)

    def recv(self, t: torch.Tensor, src: int, async_op: bool) -> CommWork:
        return self._work(async_op, None, lambda all: t.copy_(all[src]))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in = types.ModuleType("torchcomms")
    stand_in.TorchComm = Comm  # type: ignore[attr-defined]
    stand_in.ReduceOp = types.SimpleNamespace(**{op: op for op in OPS})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchcomms", stand_in)
    for name in ("torchft.process_group.torchcomms", "torchft.torchcomms"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("torchft.torchcomms")
    for name in ("torchft.process_group.torchcomms", "torchft.torchcomms"):
        sys.modules.pop(name, None)


@pytest.fixture
def groups(module: Any, store: TCPStore) -> list[Any]:
    made = [module.ProcessGroupTorchComms(Comm(str(rank)), TIMEOUT) for rank in range(2)]
    connect(made, store)
    return made


def test_only_this_module_imports_torchcomms() -> None:
    if importlib.util.find_spec("torchcomms") is not None:
        pytest.skip("torchcomms is installed")
    with pytest.raises(ModuleNotFoundError, match="torchcomms"):
        importlib.import_module("torchft.torchcomms")


def test_properties_of_the_group(module: Any) -> None:
    comm = Comm("a")
    group = module.ProcessGroupTorchComms(comm)
    assert isinstance(group, ProcessGroup) and group.comm is comm
    assert group.getBackendName() == "torchcomms:stand-in"
    assert (group.size(), group.rank()) == (1, 0)
    assert supports_reconfigure(group) and group.get_reconfigure_handle() == "handle of a"
    assert sorted(module._REDUCE_OP_MAP.values()) == sorted(OPS)
    with pytest.raises(RuntimeError, match="torchcomms:stand-in has no peers"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    with pytest.raises(ValueError, match="timeout="):
        module.ProcessGroupTorchComms(comm, timedelta(0))


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_every_operation(groups: list[Any]) -> None:
    def on_rank(rank: int) -> None:
        g, mine = groups[rank], torch.full((2,), rank + 1.0)

        def new() -> torch.Tensor:
            return mine.clone()

        def wait(work: Any, value: Any) -> None:
            future = work.get_future()
            assert work.wait() and future.wait() is value and work.is_completed()

        a, b = new(), new()
        g.allreduce([a], ReduceOp.SUM).wait()
        g.allreduce([b], options(AllreduceOptions, reduceOp=ReduceOp.MAX)).wait()
        assert (a.tolist(), b.tolist()) == ([3.0] * 2, [2.0] * 2)
        pair = [new(), new() * 10]
        wait(g.allreduce_coalesced(pair, AllreduceCoalescedOptions()), pair)
        assert [t[0].item() for t in pair] == [3.0, 30.0]
        outs = [[torch.zeros(2), torch.zeros(2)]]
        wait(g.allgather(outs, [mine], AllgatherOptions()), outs)
        assert [t[0].item() for t in outs[0]] == [1.0, 2.0]
        joined = [torch.zeros(4)]
        wait(g.allgather_into_tensor_coalesced(joined, [mine], AllgatherOptions()), joined)
        assert joined[0].tolist() == [1.0, 1.0, 2.0, 2.0]
        sent = [new()]
        wait(g.broadcast(sent, options(BroadcastOptions, rootRank=1)), sent)
        assert sent[0].tolist() == [2.0, 2.0]
        part = [torch.zeros(2)]
        wait(g.reduce_scatter(part, [[mine, mine * 10]], ReduceScatterOptions()), part)
        assert part[0].tolist() == [[3.0] * 2, [30.0] * 2][rank]
        wait(
            g.reduce_scatter_tensor_coalesced(part, [torch.cat([mine, mine * 10])], ReduceScatterOptions()),
            part,
        )
        assert part[0].tolist() == [[3.0] * 2, [30.0] * 2][rank]
        out = torch.zeros(2)
        g.alltoall_base(out, mine, [], [], AllToAllOptions()).wait()
        assert out.tolist() == [1.0, 2.0]
        uneven = torch.zeros(2 if rank == 0 else 4)
        sizes = [rank + 1, rank + 1]
        g.alltoall_base(uneven, torch.full((3,), rank + 1.0), sizes, [1, 2], AllToAllOptions()).wait()
        assert uneven.tolist() == [[1.0, 2.0], [1.0, 1.0, 2.0, 2.0]][rank]
        g.barrier(BarrierOptions()).wait()
        message = torch.full((1,), 7.0) if rank == 0 else torch.zeros(1)
        (g.send([message], 1, 0) if rank == 0 else g.recv([message], 0, 0)).wait()
        assert message.item() == 7.0

    on_ranks(2, on_rank)


def test_an_unsupported_reduction(groups: list[Any]) -> None:
    opts = AllreduceOptions()
    opts.reduceOp = torch.distributed._make_nccl_premul_sum(2.0)
    with pytest.raises(RuntimeError, match="torchcomms:stand-in does not support the reduction"):
        groups[0].allreduce([torch.ones(1)], opts)


def test_a_rank_that_calls_another_collective_is_named(
    groups: list[Any], store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_CHECK_COLLECTIVES", "1")
    where = meeting(store)
    on_ranks(2, lambda rank: groups[rank].configure(where, "replica", rank, 2))
    on_ranks(2, lambda rank: groups[rank].allreduce([torch.ones(1)], ReduceOp.SUM).wait())

    def differ(rank: int) -> None:
        groups[rank].allreduce([torch.ones(2)], ReduceOp.SUM if rank == 0 else ReduceOp.MAX).wait()

    results = in_threads([lambda rank=rank: differ(rank) for rank in range(2)])
    assert str(results[0]) == str(results[1])
    for text in ("torchcomms:stand-in: collective 1 differs", "allreduce(float32[2]; op SUM)", "op MAX"):
        assert text in str(results[0])
    groups[0].abort()
    assert groups[0]._checker is None


def test_new_peers_by_handles_and_by_a_store(groups: list[Any], store: TCPStore) -> None:
    where = meeting(store)
    on_ranks(2, lambda rank: groups[rank].configure(where, "replica", 1 - rank, 2, quorum_id=5))
    assert [group.rank() for group in groups] == [1, 0]
    assert len({*groups[0].comm.uuids}) == 2 and groups[0].comm.uuids == groups[1].comm.uuids
    with pytest.raises(ValueError, match="rank 2"):
        groups[0].configure(where, "replica", 2, 2)


def test_an_abort_ends_every_wait(groups: list[Any], store: TCPStore) -> None:
    group = groups[0]
    works = [group.allreduce([torch.ones(1)], ReduceOp.SUM) for _ in range(3)]
    future = works[2].get_future()
    timer = threading.Timer(0.1, group.abort)
    timer.start()
    for result in in_threads([works[0].wait, works[1].wait, future.wait], TIMEOUT / 6):
        assert isinstance(result, RuntimeError) and "was aborted" in str(result)
    timer.join()
    assert "was aborted" in str(group.errored())
    with pytest.raises(RuntimeError, match="was aborted"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    connect(groups, store)
    assert group.errored() is None
    on_ranks(2, lambda rank: groups[rank].barrier().wait())


def test_an_abort_while_it_connects_is_not_lost(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups[0]._comm, "reconfigure", lambda **_: CommWork(groups[0].abort))
    opts = options_of(1, [groups[0].get_reconfigure_handle()], TIMEOUT)
    with pytest.raises(RuntimeError, match="was aborted while it connected"):
        groups[0].reconfigure(opts)
    with pytest.raises(RuntimeError, match="has no peers"):
        groups[0].allreduce([torch.ones(1)], ReduceOp.SUM)


def test_a_wait_that_exceeds_its_timeout(groups: list[Any]) -> None:
    work = groups[0].allreduce([torch.ones(1)], ReduceOp.SUM)
    with pytest.raises(TimeoutError, match=r"did not end within 0:00:00\.05"):
        work.wait(timedelta(milliseconds=50))
    assert groups[0].errored() is not None


def test_a_work_reports_its_outcome(groups: list[Any]) -> None:
    tensors = [torch.ones(1) for _ in groups]
    works = [group.allreduce([tensor], ReduceOp.SUM) for group, tensor in zip(groups, tensors)]
    assert not any(work.is_success() for work in works)
    in_threads([work.wait for work in works], TIMEOUT)
    assert all(work.is_success() and work.exception() is None for work in works)
    assert works[0].result()[0] is tensors[0]
    failed = groups[0].allreduce([torch.ones(1)], ReduceOp.SUM)
    groups[0].abort()
    assert not failed.is_success() and "was aborted" in str(failed.exception())


def test_shutdown_is_final_and_can_be_repeated(groups: list[Any]) -> None:
    comm = groups[0].comm
    for _ in range(2):
        groups[0].shutdown()
    assert comm.finalized == 1
    for call in (groups[0].get_reconfigure_handle, groups[0].barrier):
        with pytest.raises(RuntimeError, match="was shut down"):
            call()
    groups[0].abort()
