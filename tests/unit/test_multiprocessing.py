"""Pipes with timeouts, and threads with the interface of processes."""

from __future__ import annotations

import threading
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Iterator

import pytest

from torchft.multiprocessing import _MonitoredPipe
from torchft.multiprocessing_dummy_context import DummyContext, get_context


@pytest.fixture
def ends() -> Iterator[tuple[_MonitoredPipe, Connection]]:
    ours, theirs = Pipe()
    yield _MonitoredPipe(ours), theirs
    ours.close()
    theirs.close()


def test_objects_travel_both_ways(ends: tuple[_MonitoredPipe, Connection]) -> None:
    ours, theirs = ends
    ours.send({"op": 1})
    assert theirs.recv() == {"op": 1}
    theirs.send(("done", 1))
    assert ours.recv(5) == ("done", 1)
    theirs.send(None)
    assert ours.recv(timedelta(seconds=5)) is None


@pytest.mark.parametrize("timeout", [0, 0.01, timedelta(milliseconds=10), -1, timedelta(seconds=-1)])
def test_no_message_is_a_timeout(ends: tuple[_MonitoredPipe, Connection], timeout: float | timedelta) -> None:
    with pytest.raises(TimeoutError):
        ends[0].recv(timeout)


def test_an_exception_is_raised_here(ends: tuple[_MonitoredPipe, Connection]) -> None:
    ours, theirs = ends
    theirs.send(KeyError("over there"))
    with pytest.raises(KeyError, match="over there"):
        ours.recv(5)


def test_the_other_end_closes(ends: tuple[_MonitoredPipe, Connection]) -> None:
    ours, theirs = ends
    closing = threading.Timer(0.02, theirs.close)
    closing.start()
    with pytest.raises(EOFError):
        ours.recv(30)
    # the fixture must not close the connection too, because its descriptor would be closed twice
    closing.join()
    with pytest.raises(BrokenPipeError):
        ours.send(1)


def test_close(ends: tuple[_MonitoredPipe, Connection]) -> None:
    ours, _ = ends
    assert not ours.closed()
    ours.close()
    ours.close()
    assert ours.closed()
    with pytest.raises(OSError, match="closed"):
        ours.recv(1)
    with pytest.raises(OSError, match="closed"):
        ours.send(1)


def test_a_process_of_the_dummy_context_is_a_thread() -> None:
    context = get_context("spawn")
    assert isinstance(context, DummyContext)
    here, there = context.Pipe()
    seen = context.Queue()

    def work(factor: int, offset: int) -> None:
        seen.put(threading.current_thread().name)
        there.send(there.recv() * factor + offset)

    process = context.Process(target=work, name="worker", args=(3,), kwargs={"offset": 1}, daemon=True)
    assert process.daemon
    process.start()
    here.send(2)
    assert here.poll(5)
    assert here.recv() == 7
    process.join(5)
    assert (process.is_alive(), process.exitcode, seen.get(timeout=5)) == (False, 0, "worker")
    here.close()
    there.close()


def test_the_primitives_of_the_dummy_context_are_those_of_threads() -> None:
    context = get_context()
    with context.Lock(), context.RLock(), context.Semaphore(1), context.BoundedSemaphore(1):
        pass
    lock = context.Lock()
    with context.Condition(lock):
        assert lock.locked()
    with context.Condition() as _:
        pass
    event = context.Event()
    event.set()
    assert event.wait(1)
    shared = context.Manager().dict(a=1)
    assert dict(shared) == {"a": 1}
