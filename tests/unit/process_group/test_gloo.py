"""Gloo with peers that fail, stall or leave: no wait is longer than necessary, and no resources leak."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Store, TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions

from tests.unit.children import run_python
from tests.unit.flickering import cleared_after_each_look
from tests.unit.process_group.gloo_peers import DEADLINE_S, PEER_ENDED, SOON, Peer, first_line, gloo, pair
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo, _attempt, wrapper
from torchft.process_group._attempt import ConnectionAttempt
from torchft.process_group._gloo import reaper
from torchft.utils import DeviceThread


@pytest.mark.parametrize(
    "make", [gloo, lambda: ProcessGroupBabyGloo(timeout=TIMEOUT)], ids=["gloo", "isolated"]
)
def test_a_group_without_peers_opens_no_connection(make: Callable[[], ProcessGroup]) -> None:
    """Otherwise, if all others failed, the last rank would wait for PyTorch's DNS query."""
    group = make()
    with socket.socket() as closed:
        closed.bind(("localhost", 0))  # a port without a listener
        group.configure(f"localhost:{closed.getsockname()[1]}/alone", "last", 0, 1)
    tensor = torch.ones(2)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="must be host:port"):
        group.configure("nowhere", "last", 0, 1)
    group.shutdown()


def test_an_abort_ends_connecting_with_a_failed_peer(store: TCPStore) -> None:
    """The peer failed between the quorum and the connection: only an abort ends the wait for it."""
    group = gloo()
    where = meeting(store)
    earlier = set(threading.enumerate())

    def abort_while_it_connects() -> float:
        deadline = time.monotonic() + DEADLINE_S
        while not any(t.name == "torchft_connect" for t in set(threading.enumerate()) - earlier):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.2)
        began = time.monotonic()
        group.abort()
        return began

    with ThreadPoolExecutor(1) as pool:
        aborted = pool.submit(abort_while_it_connects)
        with pytest.raises(RuntimeError, match="was aborted"):
            group.configure(where, "survivor", 0, 2)
        ended = time.monotonic()
    assert ended - aborted.result() < SOON
    groups = [group, gloo()]
    connect(groups, store)
    tensors = [torch.ones(1) for _ in groups]
    on_ranks(2, lambda rank: groups[rank].allreduce([tensors[rank]], ReduceOp.SUM).wait())
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
    # The failed peer connects late. That completes the survivor's abandoned attempt, whose group is destroyed
    # at once.
    late = gloo()

    def connect_and_reduce() -> None:
        late.configure(where, "late", 1, 2)
        late.allreduce([torch.ones(1)], ReduceOp.SUM).wait()

    with pytest.raises(RuntimeError):
        connect_and_reduce()
    for made in [*groups, late]:
        made.shutdown()


def test_an_abort_as_soon_as_the_connection_begins_ends_it(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that connects may begin before the waiting thread continues."""
    connects, aborted = threading.Event(), threading.Event()

    class Eager(DeviceThread):
        def start(self) -> None:
            super().start()
            connects.set()
            assert aborted.wait(TIMEOUT.total_seconds())

    monkeypatch.setattr(_attempt, "DeviceThread", Eager)
    group = gloo()

    def abort() -> None:
        assert connects.wait(TIMEOUT.total_seconds())
        group.abort()
        aborted.set()

    aborter = threading.Thread(target=abort)
    aborter.start()
    with pytest.raises(RuntimeError, match="was aborted"):
        group.configure(meeting(store), "replica", 0, 2)
    aborter.join()


@pytest.mark.parametrize("when", ["connected", "about to be used"])
def test_an_abort_after_the_connection_is_made_and_before_it_is_used_ends_it(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    group = gloo()
    result = ConnectionAttempt.result

    def connected(attempt: ConnectionAttempt[Any]) -> Any:
        made = result(attempt)
        group.abort()
        return made

    def about_to_be_used() -> bool:
        group.abort()
        return False

    if when == "connected":
        monkeypatch.setattr(ConnectionAttempt, "result", connected)
    else:
        monkeypatch.setattr(wrapper, "enabled", about_to_be_used)
    with pytest.raises(RuntimeError, match="was aborted"):
        group.configure(meeting(store), "replica", 0, 1)
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="not initialized"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


def test_an_aborted_group_may_get_peers_on_another_thread_while_it_is_used(store: TCPStore) -> None:
    group = gloo()
    group.configure(meeting(store), "replica", 0, 1)
    group.abort()
    group.__class__ = cleared_after_each_look(ProcessGroupGloo, "_aborted")
    with pytest.raises(RuntimeError, match="was aborted"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)


def test_two_threads_may_release_a_group(store: TCPStore, caplog: pytest.LogCaptureFixture) -> None:
    group = gloo()
    group.configure(meeting(store), "replica", 0, 1)
    parent = [group.parent]
    group.__class__ = cleared_after_each_look(ProcessGroupGloo, "_pg")
    group._pg = parent.pop()
    group._release(RuntimeError("aborted"))
    assert group._pg is None and reaper.drain(DEADLINE_S) and not caplog.records


def test_connecting_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own timeouts end each wait in it; this deadline is for a wait of C++ code that has none."""
    monkeypatch.setattr(_attempt, "_GRACE_SEC", 0)
    gate, discarded = threading.Event(), threading.Event()

    def discard(box: list[bool]) -> None:
        box.clear()
        discarded.set()

    attempt = ConnectionAttempt(
        lambda: gate.wait(TIMEOUT.total_seconds()), discard, timedelta(milliseconds=1)
    )
    with pytest.raises(RuntimeError, match=r"timed out: connecting with the peers, with timeout=0:00:00.001"):
        attempt.result()
    gate.set()
    assert discarded.wait(TIMEOUT.total_seconds())


@pytest.fixture
def peer(store: TCPStore) -> Iterator[Peer]:
    peer = Peer(store)
    yield peer
    peer.close()


def test_a_failed_peer_is_an_error_at_once(peer: Peer) -> None:
    work = peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)
    fut = work.get_future()
    unended = peer.group.recv_anysource([torch.ones(1)], 3)  # Gloo does not end this operation
    peer.signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=PEER_ENDED):
        work.wait()
    with pytest.raises(RuntimeError, match=PEER_ENDED):
        fut.wait()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer: torchft-gloo: "):
        unended.wait()
    with pytest.raises(RuntimeError, match=PEER_ENDED):
        peer.group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    assert time.monotonic() - started < SOON


def test_a_failed_peer_is_the_same_error_for_an_isolated_group(store: TCPStore) -> None:
    peer = Peer(store, lambda: ProcessGroupBabyGloo(timeout=TIMEOUT))
    work = peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)
    peer.signal(signal.SIGKILL)
    with pytest.raises(RuntimeError, match=PEER_ENDED):
        work.wait()
    peer.close()


def test_no_wait_for_a_silent_peer_after_an_abort(peer: Peer, store: TCPStore) -> None:
    peer.signal(signal.SIGSTOP)
    work = peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)
    fut = work.get_future()
    waiting = threading.Event()

    def wait() -> float:
        waiting.set()
        with pytest.raises(RuntimeError):
            work.wait()
        return time.monotonic()

    def abort() -> float:
        waiting.wait()
        started = time.monotonic()
        peer.group.abort()
        assert time.monotonic() - started < SOON
        return started

    ended, aborted = on_ranks(2, lambda i: [wait, abort][i]())
    assert ended - aborted < SOON
    with pytest.raises(RuntimeError):
        fut.wait()
    assert isinstance(peer.group.errored(), RuntimeError)
    with pytest.raises(RuntimeError, match="was aborted and has no peers"):
        peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)

    # Neither the next group nor the destruction of the old one waits for the peer.
    started = time.monotonic()
    peer.group.configure(meeting(store), "self", 0, 1)
    peer.group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    assert reaper.drain(SOON)
    assert time.monotonic() - started < SOON + 5  # includes the time of a lost DNS answer


def test_new_peers_end_operations_in_flight(peer: Peer, store: TCPStore) -> None:
    """Without an abort: `configure` ends the old operation and does not wait for it."""
    peer.signal(signal.SIGSTOP)
    work = peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)
    peer.group.configure(meeting(store), "self", 0, 1)
    result = in_threads([work.wait], timedelta(seconds=SOON))[0]
    assert isinstance(result, RuntimeError)
    assert peer.group.errored() is None


_LEAVES = """
import sys, torch
from datetime import timedelta
from torch.distributed import ReduceOp
from torchft.process_group import ProcessGroupGloo

group = ProcessGroupGloo(timeout=timedelta(seconds=600))
group.configure(sys.argv[1], "leaver", 1, 2)
group.barrier().wait()
pending = group.allreduce([torch.ones(1)], ReduceOp.SUM)
if sys.argv[2] == "shutdown":
    group.shutdown()
print("end", flush=True)
"""


def test_the_end_of_the_process_waits_for_no_operation(store: TCPStore) -> None:
    ways = ("shutdown", "just leaves")
    places, groups = [meeting(store) for _ in ways], [gloo() for _ in ways]
    with ThreadPoolExecutor(len(ways)) as pool:
        ends = [pool.submit(run_python, _LEAVES, where, how) for where, how in zip(places, ways)]
        for group, where, end in zip(groups, places, ends):
            group.configure(where, "self", 0, 2)
            group.barrier().wait()
            done = end.result(60)
            assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
            group.shutdown()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settle() -> None:
    """Waits a moment for the threads of earlier peers."""
    assert reaper.drain(DEADLINE_S)
    for thread in threading.enumerate():
        if thread.name == "torchft_quiet":
            thread.join(DEADLINE_S)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_reconfiguring_leaks_no_descriptors_and_no_threads(store: TCPStore) -> None:
    groups = pair(store)
    settle()
    before = descriptors(), threading.active_count()
    for _ in range(10):
        connect(groups, store)
    settle()
    assert descriptors() <= before[0] + 2
    assert threading.active_count() <= before[1]
    for group in groups:
        group.shutdown()


def test_before_there_are_peers() -> None:
    group = gloo()
    assert group.rank() == 0 and group.errored() is None
    with pytest.raises(AssertionError, match="process group not initialized"):
        group.size()
    with pytest.raises(AssertionError, match="process group not initialized"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    group.abort()
    assert group.errored() is None  # there was nothing to abort


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_bad_rank_is_named(store: TCPStore, rank: int, world_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"rank {rank} must be between 0 and world_size - 1 = {world_size - 1}"
    ):
        gloo().configure(meeting(store), "replica", rank, world_size)


def test_subclasses_change_options_context_and_work(store: TCPStore) -> None:
    seen: list[object] = []

    class Mine(ProcessGroupGloo):
        def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
            seen.append(("create", rank, world_size))
            return super()._create_pg(store, rank, world_size)

        def _opts_hook(self, opts):  # type: ignore[no-untyped-def]
            seen.append(("opts", opts))
            return ReduceOp.MAX

        def _run_context(self):  # type: ignore[no-untyped-def]
            seen.append("context")
            return super()._run_context()

        def _wrap_work(self, work: dist.Work, opts: object) -> dist.Work:
            seen.append(("work", opts))
            return work

    group = Mine(timeout=TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    assert seen == [("create", 0, 1), "context", ("opts", ReduceOp.SUM), ("work", ReduceOp.SUM)]
    group.shutdown()


def test_refusals_of_pytorch_are_passed_on(store: TCPStore) -> None:
    group = gloo()
    group.configure(meeting(store), "replica", 0, 1)
    mistakes: list[Callable[[Any], dist.Work]] = [
        lambda pg: pg.allgather([[torch.zeros(3)]], [torch.ones(2)], AllgatherOptions()),
        lambda pg: pg.allreduce([], ReduceOp.SUM),
        lambda pg: pg.recv([torch.ones(1), torch.ones(1)], 0, 0),
        lambda pg: pg.broadcast([torch.ones(1)], "no options"),
    ]
    for mistake in mistakes:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as ours:
            mistake(group).wait()
        with pytest.raises(type(ours.value)) as theirs:
            mistake(group.parent).wait()
        assert first_line(ours.value) == first_line(theirs.value)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()
