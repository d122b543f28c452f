"""Behavior that only isolated groups have. The conformance suite covers the behavior of all groups."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any, Callable

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from tests.promises import ABORT_S, within
from tests.unit.process_group.isolated.processes import (
    ended,
    wait_until,
    worker,
    workers,
)
from tests.unit.process_group.ranks import connect, in_threads, on_ranks
from torchft.process_group import ProcessGroup, ProcessGroupBabyGloo
from torchft.process_group.isolated import channel as channel_module


def pending(group: ProcessGroup) -> Any:
    return group.recv([torch.zeros(1)], 0, 99)


def assert_all_end(group: ProcessGroup, end: Callable[[], None], message: str) -> None:
    """Two threads wait for operations and one for a future; `end` makes all of them fail, at once."""
    works = [pending(group) for _ in range(3)]
    future = works[2].get_future()
    started = threading.Barrier(4)
    ended: list[float] = []

    def wait(call: Callable[[], Any]) -> None:
        started.wait(10)
        try:
            call()
        finally:
            ended.append(time.monotonic())

    def kill() -> float:
        started.wait(10)
        time.sleep(0.05)  # usually all three wait by now; the assertions also hold if one does not yet
        now = time.monotonic()
        end()
        return now

    calls = [lambda: wait(works[0].wait), lambda: wait(works[1].wait), lambda: wait(future.wait)]
    *errors, at = in_threads([*calls, kill])
    for error in errors:
        assert isinstance(error, RuntimeError) and message in str(error)
    print(f"{message}: all waits had ended after {1000 * (max(ended) - at):.1f} ms")
    assert max(ended) - at < within(ABORT_S)


def test_a_killed_worker_ends_all_waits(pair: list[ProcessGroup], store: TCPStore) -> None:
    isolated = pair[1]
    pid = worker()
    assert_all_end(isolated, lambda: os.kill(pid, signal.SIGKILL), "the worker process has ended")
    assert isinstance(isolated.errored(), RuntimeError)
    with pytest.raises(RuntimeError, match="the worker process has ended"):
        pending(isolated)
    wait_until(lambda: pid not in workers(), "it is reaped")
    connect(pair, store)
    on_ranks(2, lambda rank: pair[rank].allreduce([torch.ones(1)], ReduceOp.SUM).wait())


def test_an_abort_ends_all_waits(pair: list[ProcessGroup]) -> None:
    assert_all_end(pair[1], pair[1].abort, "was aborted")
    assert isinstance(pair[1].errored(), RuntimeError)


def test_shared_memory_is_released_only_after_the_worker_has_ended(
    alone: ProcessGroupBabyGloo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the worker may still write to it. The kill is delayed here."""
    alone.allreduce([torch.ones(4)], ReduceOp.SUM).wait()
    assert alone._worker is not None
    closed = threading.Event()
    monkeypatch.setattr(alone._worker.devices, "close", closed.set)
    monkeypatch.setattr(alone._worker, "_hang_up", lambda: None)
    monkeypatch.setattr(alone._worker, "kill", lambda: None)
    pid = worker()
    alone.abort()
    assert not closed.is_set() and pid in workers()
    os.kill(pid, signal.SIGKILL)
    assert closed.wait(60)
    assert ended(pid)


def test_a_stopped_worker_is_killed(pair: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker under SIGSTOP neither answers nor exits."""
    monkeypatch.setattr(channel_module, "_PING_EVERY_SEC", 0.05)
    monkeypatch.setattr(channel_module, "_UNRESPONSIVE_SEC", 0.3)
    isolated = pair[1]
    isolated.set_timeout(timedelta(milliseconds=100))
    pid = worker()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="does not respond"):
        pending(isolated).wait()
    wait_until(lambda: pid not in workers(), "it is killed")


def test_a_stopped_worker_that_is_sent_more_than_a_socket_holds_is_killed(
    pair: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends waits for it."""
    monkeypatch.setattr(channel_module, "_PING_EVERY_SEC", 0.05)
    monkeypatch.setattr(channel_module, "_UNRESPONSIVE_SEC", 0.3)
    isolated = pair[1]
    isolated.set_timeout(timedelta(milliseconds=100))
    pid = worker()
    os.kill(pid, signal.SIGSTOP)

    def send_many() -> None:
        for _ in range(100_000):
            pending(isolated)

    with pytest.raises(RuntimeError, match="does not respond"):
        send_many()
    wait_until(lambda: pid not in workers(), "it is killed")
