"""Gloo with peers that die, hang or leave: nobody waits longer than necessary, nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Store, TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions

from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroupGloo, _reaper
from torchft.process_group._connections import Connections, _raw

# What "at once" means on a loaded machine; the operations would otherwise wait for TIMEOUT.
SOON = 5.0


def gloo() -> ProcessGroupGloo:
    return ProcessGroupGloo(timeout=TIMEOUT)


def pair(store: TCPStore) -> list[ProcessGroupGloo]:
    groups = [gloo(), gloo()]
    connect(groups, store)
    return groups


# Peers in other processes


def _take_part_once(where: str, ready: Connection) -> None:
    group = gloo()
    group.configure(where, "peer", 1, 2)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    ready.send(None)
    ready.recv()


class Peer:
    """Rank 1 in another process, which takes part in one allreduce and in nothing after it."""

    def __init__(self, store: TCPStore) -> None:
        # A server that has imported PyTorch: each child costs milliseconds instead of seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torchft.process_group"])
        where = meeting(store)
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_take_part_once, args=(where, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.group = gloo()
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


def test_a_dead_peer_is_an_error_at_once(peer: Peer) -> None:
    work = peer.group.allreduce([torch.ones(1)], ReduceOp.SUM)
    fut = work.get_future()
    peer.signal(signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        work.wait()
    with pytest.raises(RuntimeError):
        fut.wait()
    with pytest.raises(RuntimeError):
        peer.group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    assert time.monotonic() - started < SOON


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
        assert time.monotonic() - started < 0.1 * SOON
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
    assert _reaper.drain(SOON)
    assert time.monotonic() - started < SOON + 5  # a lost question to the name server


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
pending = group.allreduce([torch.ones(1)], ReduceOp.SUM)
if sys.argv[2] == "shutdown":
    group.shutdown()
print("end", flush=True)
"""


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
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "end\n"), err
        group.shutdown()


# Cutting connections


def test_the_peers_notice_an_abort(store: TCPStore) -> None:
    groups = [gloo() for _ in range(3)]
    connect(groups, store)
    works = [groups[rank].broadcast_one(torch.zeros(1), 2) for rank in (0, 1)]
    groups[2].abort()
    results = in_threads([work.wait for work in works], timedelta(seconds=SOON))
    assert [type(result) for result in results] == [RuntimeError] * 2
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
    (connections,) = groups[0]._connections.values()
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


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors in /proc")
def test_reconfiguring_leaks_no_descriptors_and_no_threads(store: TCPStore) -> None:
    groups = pair(store)
    assert _reaper.drain(SOON)
    before = descriptors(), threading.active_count()
    for _ in range(10):
        connect(groups, store)
    assert _reaper.drain(SOON)
    assert (descriptors(), threading.active_count()) <= (before[0] + 2, before[1])
    assert [len(group._connections) for group in groups] == [1, 1]
    for group in groups:
        group.shutdown()


def test_a_group_that_takes_long_to_die_holds_up_nobody() -> None:
    dying, end = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            dying.set()
            end.wait(30)

    _reaper.reap([Slow()])
    assert dying.wait(SOON)
    assert not _reaper.drain(0.01)
    end.set()
    assert _reaper.drain(SOON)


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
        lambda pg: pg.allreduce([torch.ones(1, dtype=torch.complex64)], ReduceOp.MAX),
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
