"""Waits for operations that Gloo itself does not end."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore
from torch.futures import Future

from tests.unit.process_group.gloo_peers import DEADLINE_S, SOON, connections_of, gloo, pair
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroupGloo
from torchft.process_group._gloo import connections as connections_module
from torchft.process_group._gloo import operations as operations_module
from torchft.process_group._gloo import reaper


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a system without /proc, or another version of Gloo."""
    monkeypatch.setattr(connections_module, "_DESCRIPTORS", "/nonexistent")


@pytest.mark.usefixtures("blind")
def test_without_known_connections_waits_end_and_operations_are_left(store: TCPStore) -> None:
    groups = pair(store)
    assert len(connections_of(groups[0])) == 0
    works = [groups[0].broadcast_one(torch.zeros(1), 1), groups[0].recv([torch.zeros(1)], 1, 7)]
    fut = groups[0].allreduce([torch.ones(1)], ReduceOp.SUM).get_future()
    waits: list[Callable[[], object]] = [
        *[work.wait for work in works],
        fut.wait,
        fut.then(lambda f: f.value()).wait,
    ]
    started = time.monotonic()
    groups[0].abort()
    results = in_threads(waits, timedelta(seconds=SOON))
    took = time.monotonic() - started
    assert [type(result) for result in results] == [RuntimeError] * 4
    assert all("torchft-gloo was aborted" in str(result) for result in results)
    groups[0].configure(meeting(store), "self", 0, 1)
    groups[0].allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    assert took < SOON
    assert works[0].is_completed() and not works[0].is_success() and works[0].exception() is not None
    # The reaper still holds the old group, whose operations end when the peer closes its connections.
    assert not reaper.drain(0.0)
    groups[1].shutdown()
    assert reaper.drain(DEADLINE_S)


def test_a_receive_from_any_source_ends_with_an_abort(store: TCPStore) -> None:
    groups = pair(store)
    work = groups[0].recv_anysource([torch.zeros(1)], 0)
    groups[0].abort()
    assert isinstance(in_threads([work.wait], timedelta(seconds=SOON))[0], RuntimeError)
    groups[1].shutdown()


def test_a_receive_from_any_source_returns_the_source(store: TCPStore) -> None:
    groups = pair(store)
    tensor = torch.zeros(1)
    work = groups[0].recv_anysource([tensor], 3)
    on_ranks(2, lambda rank: work.wait() if rank == 0 else groups[1].send([torch.ones(1)], 0, 3).wait())
    assert (tensor.item(), work._source_rank()) == (1.0, 1)
    for group in groups:
        group.shutdown()


class Stuck(dist.Work):
    """An operation that Gloo does not end, because it took the send off its list when the connection
    broke.
    """

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[object] = Future()
        self.over = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return self.over

    def get_future(self) -> Future[object]:
        return self.future


def test_an_operation_that_misses_the_end_of_all_connections_ends(store: TCPStore) -> None:
    groups = pair(store)
    operations = groups[0]._operations
    assert operations is not None
    work, other = Stuck(), Stuck()
    guarded, promised = (
        operations.guard(work, "allreduce", ()),
        operations.guard(other, "allreduce", ()).get_future(),
    )
    groups[1].abort()
    results = in_threads([guarded.wait, promised.wait], timedelta(seconds=SOON))
    assert ["connections with all peers are broken" in str(result) for result in results] == [True, True]
    assert ["Connection closed by peer: torchft-gloo: " in str(result) for result in results] == [True, True]
    other.future.set_result(None)  # a later end has no effect
    groups[0].shutdown()


def test_a_drain_waits_for_the_real_end(store: TCPStore) -> None:
    """A wait ends with the abort, while the operation may still write to its tensors."""
    groups = pair(store)
    operations = groups[0]._operations
    assert operations is not None
    work = Stuck()
    guarded = operations.guard(work, "allreduce", ())
    groups[0].abort()
    with pytest.raises(RuntimeError, match="abort"):
        guarded.wait()
    assert isinstance(guarded, operations_module._GuardedWork)
    assert not guarded.drain(timedelta(milliseconds=5))
    with ThreadPoolExecutor(1) as threads:
        drained = threads.submit(guarded.drain, timedelta(seconds=DEADLINE_S))
        work.over = True
        assert drained.result(DEADLINE_S)
    groups[1].shutdown()


def test_a_collective_without_one_of_its_peers_ends(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other peers may have stalled too, so they abort nothing. Operations between two healthy peers
    continue.
    """
    monkeypatch.setattr(operations_module, "_DAMAGED_SEC", 0.05)
    groups = [gloo() for _ in range(3)]
    connect(groups, store)
    operations = groups[0]._operations
    assert operations is not None
    guarded = operations.guard(Stuck(), "allreduce", ())
    received = groups[0].recv([torch.zeros(1)], 1, 0)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(received.wait)
        groups[2].abort()
        result = in_threads([guarded.wait], timedelta(seconds=SOON))[0]
        assert "the connection with a peer is broken" in str(result) or "all peers" in str(result)
        assert str(result).startswith("Connection closed by peer")
        # this process has both ends, so the abort may have cut other connections, too
        if "all peers" not in str(result):
            assert not receiving.done()
            groups[1].send([torch.ones(1)], 0, 0).wait()
            assert receiving.result(DEADLINE_S)
    for group in groups:
        group.shutdown()


def test_a_wait_ends_at_its_own_deadline(store: TCPStore) -> None:
    groups = pair(store)
    work = groups[0].broadcast_one(torch.zeros(1), 1)
    for timeout in (timedelta(milliseconds=1), timedelta(milliseconds=70)):
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timeout)
        assert timeout.total_seconds() <= time.monotonic() - started < SOON
    assert not work.is_completed()
    on_ranks(2, lambda rank: work.wait() if rank == 0 else groups[1].broadcast_one(torch.ones(1), 1).wait())
    assert work.is_success()
    for group in groups:
        group.shutdown()


def test_a_monitored_barrier_names_missing_ranks(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(3)]
    connect(groups, store)
    assert on_ranks(3, lambda rank: groups[rank].monitored_barrier()) == [None] * 3
    short = timedelta(milliseconds=200)
    came = [lambda rank=rank: groups[rank].monitored_barrier(short, wait_all_ranks=True) for rank in (0, 2)]
    missed, _ = in_threads(came)
    assert isinstance(missed, RuntimeError) and "monitoredBarrier" in str(missed)
    assert re.search(r"[Rr]anks? 1\b", str(missed)), missed
    for group in groups:
        group.shutdown()


def test_an_abort_ends_a_monitored_barrier(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    connect(groups, store)
    threading.Timer(0.1, groups[0].abort).start()
    (result,) = in_threads([groups[0].monitored_barrier], TIMEOUT / 3)
    assert isinstance(result, RuntimeError)
    groups[1].shutdown()


def test_the_thread_that_watches_futures_ends(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations_module, "_IDLE_SEC", 0.01)
    group = gloo()
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).get_future().wait()
    watcher = operations_module._watcher
    assert watcher is not None
    watcher.join(DEADLINE_S)
    assert not watcher.is_alive()
    group.shutdown()
