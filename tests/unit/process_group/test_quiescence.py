"""An operation with cut connections and sleeping threads does not write any more."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Callable

import pytest
import torch
from torch.distributed import TCPStore

from tests.unit.process_group.gloo_peers import DEADLINE_S, pair
from tests.unit.process_group.test_operations import Stuck
from torchft.process_group._gloo import connections as connections_module
from torchft.process_group._gloo import quiescence as module
from torchft.process_group._gloo.operations import _GuardedWork
from torchft.process_group._gloo.quiescence import Quiescence

NEVER = timedelta(seconds=3 * module._STILL_SEC)


@contextmanager
def thread(name: str, turn: Callable[[threading.Event], object]) -> Iterator[None]:
    """A thread with a given name, which alternates between running and sleeping until it is ended."""
    ended, begun = threading.Event(), threading.Event()

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        begun.set()
        while not ended.is_set():
            turn(ended)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    assert begun.wait(DEADLINE_S)
    try:
        yield
    finally:
        ended.set()
        running.join(DEADLINE_S)


def reached_within(seconds: float) -> bool:
    quiescence, deadline = Quiescence(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        if quiescence.reached():
            return True
        time.sleep(0.001)
    return False


def spin(ended: threading.Event) -> None:
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        pass


def sleep(ended: threading.Event) -> None:
    ended.wait()


def wake_often(ended: threading.Event) -> None:
    ended.wait(0.01)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignores threads that other tests left waiting for Gloo's timeout."""
    monkeypatch.setattr(module, "_RUNNER", "test_runner")
    monkeypatch.setattr(module, "_LOOP", "test_loop")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("runner", "loop", "still"),
    [
        pytest.param(sleep, sleep, True, id="all sleep"),
        pytest.param(sleep, wake_often, True, id="an event loop wakes"),
        pytest.param(wake_often, sleep, False, id="an operation wakes now and then"),
        pytest.param(spin, sleep, False, id="an operation computes"),
        pytest.param(sleep, spin, False, id="an event loop takes in data"),
    ],
)
def test_all_threads_have_to_sleep(
    runner: Callable[[threading.Event], object], loop: Callable[[threading.Event], object], still: bool
) -> None:
    with thread("test_runner", runner), thread("test_loop", loop):
        assert reached_within(DEADLINE_S if still else NEVER.total_seconds()) is still


@pytest.mark.usefixtures("alone")
def test_it_is_unknown_without_threads_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with thread("test_loop", sleep):
        assert not reached_within(NEVER.total_seconds())
    monkeypatch.setattr(module, "_TASKS", "/nonexistent")
    assert not reached_within(NEVER.total_seconds())


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15),
    reason="older versions of PyTorch may not name Gloo's threads; the test above has that case",
)
def test_the_threads_have_these_names(store: TCPStore) -> None:
    groups = pair(store)
    names = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread of an earlier test has just ended
            names.add(path.read_text().strip())
    assert {module._RUNNER, module._LOOP} <= names
    for group in groups:
        group.shutdown()


def stuck(store: TCPStore, name: str = "allreduce") -> tuple[Stuck, _GuardedWork]:
    """An operation that was not woken by the abort of its group."""
    groups = pair(store)
    work = Stuck()
    assert groups[0]._operations is not None
    guarded = groups[0]._operations.guard(work, name, ())
    for group in groups:
        group.abort()
    assert isinstance(guarded, _GuardedWork)
    return work, guarded


@pytest.mark.usefixtures("alone")
def test_an_operation_that_sleeps_without_connections_is_not_waited_for(store: TCPStore) -> None:
    work, guarded = stuck(store)
    with thread("test_runner", sleep):
        assert guarded.drain(timedelta(seconds=DEADLINE_S)) and not work.over and not guarded.ended()
    with thread("test_runner", spin):
        assert not guarded.drain(NEVER)


@pytest.mark.usefixtures("alone")
def test_an_operation_with_unknown_connections_is_waited_for(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "_DESCRIPTORS", "/nonexistent")
    _, guarded = stuck(store)
    with thread("test_runner", sleep):
        assert not guarded.drain(NEVER)


@pytest.mark.usefixtures("alone")
def test_an_operation_that_may_write_before_it_sends_is_waited_for(store: TCPStore) -> None:
    _, guarded = stuck(store, "allgather")
    with thread("test_runner", sleep):
        assert not guarded.drain(NEVER)


@pytest.mark.usefixtures("alone")
def test_an_operation_with_an_uncut_connection_is_waited_for(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor_left(descriptor: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", no_descriptor_left)
        _, guarded = stuck(store)
    with thread("test_runner", sleep):
        assert not guarded.drain(NEVER)
