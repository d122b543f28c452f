"""Gloo with peers that die, hang or leave: nobody waits longer than necessary, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Store, TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions
from torch.futures import Future

from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo, _attempt
from torchft.process_group._gloo import connections as connections_module
from torchft.process_group._gloo import operations as operations_module
from torchft.process_group._gloo import reaper
from torchft.process_group._gloo.connections import Connections, _listening, _raw

# What an abort promises; the operations would otherwise wait for TIMEOUT.
SOON = within(ABORT_S)
# For what nothing is promised.
DEADLINE_S = 10.0
# What Gloo says of a peer that is gone; which of the two is the kernel's choice.
GONE = r"(Connection closed by peer|Read error .*: Connection reset by peer)"


def gloo() -> ProcessGroupGloo:
    return ProcessGroupGloo(timeout=TIMEOUT)


def pair(store: TCPStore) -> list[ProcessGroupGloo]:
    groups = [gloo(), gloo()]
    connect(groups, store)
    return groups


@pytest.mark.parametrize("make", [gloo, lambda: ProcessGroupBabyGloo(timeout=TIMEOUT)], ids=["gloo", "isolated"])
def test_who_is_alone_connects_with_nobody(make: Callable[[], ProcessGroup]) -> None:
    """All others died, and what the last one waited for there was PyTorch's question to the name server."""
    group = make()
    with socket.socket() as closed:
        closed.bind(("localhost", 0))  # and nobody listens
        group.configure(f"localhost:{closed.getsockname()[1]}/alone", "last", 0, 1)
    tensor = torch.ones(2)
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="must be host:port"):
        group.configure("nowhere", "last", 0, 1)
    group.shutdown()


def test_an_abort_ends_a_connection_that_a_dead_peer_holds_up(store: TCPStore) -> None:
    """The peer died between the quorum and the connection: nobody but an abort ends the wait for it."""
    group = gloo()
    where = meeting(store)
    began = time.monotonic()
    aborter = threading.Timer(0.2, group.abort)
    aborter.start()
    with pytest.raises(RuntimeError, match="was aborted"):
        group.configure(where, "survivor", 0, 2)
    assert time.monotonic() - began < SOON
    aborter.join()
    groups = [group, gloo()]
    connect(groups, store)
    tensors = [torch.ones(1) for _ in groups]
    on_ranks(2, lambda rank: groups[rank].allreduce([tensors[rank]], ReduceOp.SUM).wait())
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
    # Its peer comes after all: what is made too late is destroyed.
    late = gloo()
    late.configure(where, "late", 1, 2)
    with pytest.raises(RuntimeError):
        late.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    for made in [*groups, late]:
        made.shutdown()


def test_an_abort_as_soon_as_the_connection_begins_ends_it(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that connects may be there before the one that waits for it goes on."""
    connects, aborted = threading.Event(), threading.Event()

    class Eager(threading.Thread):
        def start(self) -> None:
            super().start()
            connects.set()
            assert aborted.wait(TIMEOUT.total_seconds())

    monkeypatch.setattr(_attempt, "threading", SimpleNamespace(**{**vars(threading), "Thread": Eager}))
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


# Peers in other processes


def _take_part_once(where: str, ready: Connection) -> None:
    group = gloo()
    group.configure(where, "peer", 1, 2)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    ready.send(None)
    ready.recv()


class Peer:
    """Rank 1 in another process, which takes part in one allreduce and in nothing after it."""

    def __init__(self, store: TCPStore, make: Callable[[], ProcessGroup] = gloo) -> None:
        # A server that has imported PyTorch: each child costs milliseconds instead of seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchft.process_group"])
        where = meeting(store)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_take_part_once, args=(where, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.group = make()
        self.group.configure(where, "self", 0, 2)
        self.group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
        assert self._pipe.poll(TIMEOUT.total_seconds())
        self._pipe.recv()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT.total_seconds())
        self._pipe.close()
        self.group.shutdown()


@pytest.fixture
def peer(store: TCPStore) -> Iterator[Peer]:
    peer = Peer(store)
    yield peer
    peer.close()


@pytest.mark.processes
def test_a_dead_peer_is_an_error_at_once(peer: Peer) -> None:
    work = peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)
    fut = work.get_future()
    unended = peer.group.recv_anysource([torch.ones(1)], 3)  # Gloo does not end this one
    peer.signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=GONE):
        work.wait()
    with pytest.raises(RuntimeError, match=GONE):
        fut.wait()
    with pytest.raises(RuntimeError, match=r"^Connection closed by peer: torchft-gloo: "):
        unended.wait()
    with pytest.raises(RuntimeError, match=GONE):
        peer.group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    assert time.monotonic() - started < SOON


@pytest.mark.processes
def test_a_dead_peer_is_the_same_error_for_an_isolated_group(store: TCPStore) -> None:
    peer = Peer(store, lambda: ProcessGroupBabyGloo(timeout=TIMEOUT))
    work = peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)
    peer.signal(signal.SIGKILL)
    with pytest.raises(RuntimeError, match=GONE):
        work.wait()
    peer.close()


@pytest.mark.processes
def test_a_silent_peer_holds_up_nobody_after_an_abort(peer: Peer, store: TCPStore) -> None:
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
    assert time.monotonic() - started < SOON + 5  # a lost question to the name server


@pytest.mark.processes
def test_new_peers_end_what_is_in_flight(peer: Peer, store: TCPStore) -> None:
    """Without an abort: the caller of configure does not wait, and the old operation ends."""
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


@pytest.mark.processes
def test_the_end_of_the_process_waits_for_no_operation(store: TCPStore) -> None:
    leavers = []
    for how in ("shutdown", "just leaves"):
        where, group = meeting(store), gloo()
        process = subprocess.Popen(
            [sys.executable, "-c", _LEAVES, where, how],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        leavers.append((process, group, where))
    for process, group, where in leavers:
        group.configure(where, "self", 0, 2)
        group.barrier().wait()
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "end\n"), err
        group.shutdown()


# Cutting connections


def connections_of(group: ProcessGroupGloo) -> Connections:
    assert group._operations is not None and group._operations.connections is not None
    return group._operations.connections


def test_the_peers_notice_an_abort(store: TCPStore) -> None:
    groups = [gloo() for _ in range(3)]
    connect(groups, store)
    works = [groups[rank].broadcast_one(torch.zeros(1), 2) for rank in (0, 1)]
    groups[2].abort()
    results = in_threads([work.wait for work in works], timedelta(seconds=SOON))
    assert [type(result) for result in results] == [RuntimeError] * 2
    assert all(re.search(GONE, str(result)) for result in results), results
    for group in groups:
        group.shutdown()


def test_only_the_connections_of_this_group_are_cut(store: TCPStore) -> None:
    here, there = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    mine, others = pair(store), pair(store)
    mine[0].abort()

    on_ranks(2, lambda rank: others[rank].barrier().wait())
    assert store.add("still connected", 1) == 1
    for near, far in ((here, there), (client, accepted)):
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        near.close()
        far.close()
    for group in mine + others:
        group.shutdown()


def test_a_descriptor_that_was_given_to_somebody_else_is_left_alone(store: TCPStore) -> None:
    groups = pair(store)
    connections = connections_of(groups[0])
    assert len(connections) > 0
    # As if the connections had been closed and their numbers used for these.
    pairs = [socket.socketpair() for _ in range(len(connections))]
    connections._connections = {
        ours.fileno(): connection for (ours, _), connection in zip(pairs, connections._connections.values())
    }
    connections.shutdown()
    assert len(connections) == 0
    for ours, theirs in pairs:
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        ours.close()
        theirs.close()
    on_ranks(2, lambda rank: groups[rank].barrier().wait())
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("interfaces", ["lo", "lo,lo"])
def test_every_context_of_gloo_is_cut(store: TCPStore, interfaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take turns on the contexts: the first of these is on one of them, the second on the other."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    groups = pair(store)
    assert len(connections_of(groups[0])) == len(interfaces.split(","))
    works = [groups[1].broadcast_one(torch.zeros(1), 0) for _ in range(2)]
    groups[0].abort()
    results = in_threads([work.wait for work in works], timedelta(seconds=SOON))
    assert [first_line(r)[-6:] != "broken" for r in results if isinstance(r, RuntimeError)] == [True, True]
    for group in groups:
        group.shutdown()


def test_ipv6_is_cut(store: TCPStore) -> None:
    if not can_bind("::1"):
        pytest.skip("this host has no IPv6")
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="::1")]
    options._timeout = TIMEOUT
    prefix = meeting(store).partition("/")[2]

    def make(rank: int) -> tuple[Any, Connections]:
        own = dist.PrefixStore(prefix, TCPStore("localhost", store.port, is_master=False, wait_for_workers=False))
        return dist.ProcessGroupGloo(own, rank, 2, options), Connections(own, rank, 2)

    (first, connections), (second, _) = on_ranks(2, make)
    assert len(connections) == 2
    work = second.recv([torch.zeros(1)], 0, 0)
    connections.shutdown()
    assert isinstance(in_threads([work.wait], timedelta(seconds=SOON))[0], RuntimeError)
    del first


def can_bind(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def published(address: bytes, host: bytes = b"host") -> bytes:
    """What a rank of Gloo publishes: most of the address is memory that was never written."""
    rest = struct.pack("=H", socket.AF_INET) + b"\x11\x11" + b"\x7f\0\0\1"  # as if left by somebody else
    storage = (address + rest * 16)[:128]
    return struct.pack("=Q", len(host)) + host + struct.pack("=Q", 136) + storage + bytes(8) + struct.pack("=Q", 1)


def test_an_address_is_read_from_what_a_rank_publishes() -> None:
    four = _raw(socket.AF_INET, ("1.2.3.4", 258))[0]
    six = _raw(socket.AF_INET6, ("fe80::1", 258, 0, 0))[0]
    assert _listening(published(four)) == four
    assert _listening(published(six[:4] + b"flow" + six[8:], host=b"")) == six
    unix = struct.pack("=H", socket.AF_UNIX)
    for other in (b"", b"text", published(unix), published(four)[:40], b"\xff" * 200):
        assert _listening(other) is None


# Where Gloo itself does not let go


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were no /proc, or another version of Gloo."""
    monkeypatch.setattr(connections_module, "_DESCRIPTORS", "/nonexistent")


@pytest.mark.usefixtures("blind")
def test_without_known_connections_waiters_return_and_nobody_waits_for_the_rest(store: TCPStore) -> None:
    groups = pair(store)
    assert len(connections_of(groups[0])) == 0
    works = [groups[0].broadcast_one(torch.zeros(1), 1), groups[0].recv([torch.zeros(1)], 1, 7)]
    fut = groups[0].allreduce([torch.ones(1)], ReduceOp.SUM).get_future()
    waits: list[Callable[[], object]] = [*[work.wait for work in works], fut.wait, fut.then(lambda f: f.value()).wait]
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
    # The reaper is left with the old group, which ends now that its peer takes part.
    groups[1].shutdown()
    assert fut.done()


def test_a_receive_from_anybody_ends_with_an_abort(store: TCPStore) -> None:
    groups = pair(store)
    work = groups[0].recv_anysource([torch.zeros(1)], 0)
    groups[0].abort()
    assert isinstance(in_threads([work.wait], timedelta(seconds=SOON))[0], RuntimeError)
    groups[1].shutdown()


def test_a_receive_from_anybody_names_its_source(store: TCPStore) -> None:
    groups = pair(store)
    tensor = torch.zeros(1)
    work = groups[0].recv_anysource([tensor], 3)
    on_ranks(2, lambda rank: work.wait() if rank == 0 else groups[1].send([torch.ones(1)], 0, 3).wait())
    assert (tensor.item(), work._source_rank()) == (1.0, 1)
    for group in groups:
        group.shutdown()


class Stuck(dist.Work):
    """As a send of Gloo that was taken off its list in the moment in which the connection broke."""

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
    guarded, promised = operations.guard(work, "allreduce", ()), operations.guard(other, "allreduce", ()).get_future()
    groups[1].abort()
    results = in_threads([guarded.wait, promised.wait], timedelta(seconds=SOON))
    assert ["connections with all peers are broken" in str(result) for result in results] == [True, True]
    assert ["Connection closed by peer: torchft-gloo: " in str(result) for result in results] == [True, True]
    other.future.set_result(None)  # too late: nobody minds
    groups[0].shutdown()


def test_whoever_drains_waits_for_the_real_end(store: TCPStore) -> None:
    """Waiting ends with an abort; the operation may still write into its tensors."""
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
    """The other peers may be stuck as we are, and abort nothing. What two live peers send each other goes on."""
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
        if "all peers" not in str(result):  # this process holds both ends: the abort may have cut others, too
            assert not receiving.done()
            groups[1].send([torch.ones(1)], 0, 0).wait()
            assert receiving.result(DEADLINE_S)
    for group in groups:
        group.shutdown()


def test_a_wait_has_the_deadline_that_it_is_given(store: TCPStore) -> None:
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


def test_a_monitored_barrier_names_who_did_not_come(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(3)]
    connect(groups, store)
    assert on_ranks(3, lambda rank: groups[rank].monitored_barrier()) == [None] * 3
    short = timedelta(milliseconds=200)
    came = [lambda rank=rank: groups[rank].monitored_barrier(short, wait_all_ranks=True) for rank in (0, 2)]
    missed, _ = in_threads(came)
    assert isinstance(missed, RuntimeError) and "1" in str(missed) and "monitoredBarrier" in str(missed)
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


def test_without_published_addresses_nothing_is_cut() -> None:
    assert len(Connections(dist.HashStore(), 0, 2)) == 0
    assert len(Connections(dist.HashStore(), 0, 1)) == 0


@pytest.mark.parametrize(
    ("family", "address", "raw"),
    [
        (socket.AF_INET, ("1.2.3.4", 258), [b"\x01\x02\x01\x02\x03\x04"]),
        (socket.AF_INET6, ("::1", 258, 0, 0), [b"\x01\x02" + bytes(4) + bytes(15) + b"\x01"]),
        (
            socket.AF_INET6,
            ("fe80::1%lo", 258, 0, 1),
            [b"\x01\x02" + bytes(4) + b"\xfe\x80" + bytes(13) + b"\x01"],
        ),
        (
            socket.AF_INET6,
            ("::ffff:1.2.3.4", 258, 0, 0),
            [b"\x01\x02" + bytes(4) + bytes(10) + b"\xff\xff\x01\x02\x03\x04", b"\x01\x02\x01\x02\x03\x04"],
        ),
        (socket.AF_UNIX, "/some/path", []),
        (socket.AF_UNSPEC, (1, 2), []),
    ],
)
def test_addresses_as_they_stand_in_memory(family: int, address: object, raw: list[bytes]) -> None:
    # The first two bytes are the family, in the order of this machine.
    assert [text[2:] for text in _raw(family, address)] == raw


# Nothing is left behind


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def settle() -> None:
    """Waits for the threads that old peers leave behind for a moment."""
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


def test_a_group_that_takes_long_to_die_holds_up_nobody() -> None:
    dying, end = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            dying.set()
            end.wait(30)

    reaper.reap([Slow()])
    assert dying.wait(DEADLINE_S)
    assert not reaper.drain(0.01)
    end.set()
    assert reaper.drain(DEADLINE_S)


# The rest of the wrapper


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
    with pytest.raises(ValueError, match=f"rank {rank} must be between 0 and world_size - 1 = {world_size - 1}"):
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


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def test_what_pytorch_refuses_is_refused_the_same_way(store: TCPStore) -> None:
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
