from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist

from torchft._manager.step.work import _ManagedFuture, _ManagedWork, _SimpleFuture
from torchft.futures import future_wait


class Reports:
    """Replaces the Manager."""

    def __init__(self, timeout: float = 30) -> None:
        self._timeout = timedelta(seconds=timeout)
        self.errors: list[Exception] = []

    def report_error(self, e: Exception) -> None:
        self.errors.append(e)


class Pending(dist._Work):
    """A collective that the test ends."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self.timeouts: list[Optional[timedelta]] = []

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        self.timeouts.append(timeout)
        future_wait(self.future, timedelta(seconds=30) if timeout is None else timeout)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


def make(timeout: float = 30) -> tuple[_ManagedWork, Pending, Reports, torch.Tensor]:
    reports, pending, tensor = Reports(timeout), Pending(), torch.tensor([8.0])
    work = _ManagedWork(reports, pending, tensor)  # type: ignore[arg-type]
    work.on_success = lambda: tensor.div_(2)
    return work, pending, reports, tensor


def test_many_waiters_one_division() -> None:
    work, pending, reports, tensor = make()
    waiters = [threading.Thread(target=work.wait) for _ in range(4)]
    for waiter in waiters[:2]:
        waiter.start()
    future = work.get_future()
    for waiter in waiters[2:]:
        waiter.start()
    pending.future.set_result(None)
    assert future.wait() is tensor
    for waiter in waiters:
        waiter.join(30)
    assert tensor.tolist() == [4.0] and reports.errors == []


def test_wait_passes_its_timeout_on() -> None:
    work, pending, _, _ = make()
    pending.future.set_result(None)
    work.wait(timedelta(seconds=3))
    assert pending.timeouts == [timedelta(seconds=3)]
    work, pending, _, _ = make(timeout=7)
    pending.future.set_result(None)
    work.wait()
    assert pending.timeouts == [timedelta(seconds=7)]


def test_error_is_reported_once_and_leaves_the_value() -> None:
    work, pending, reports, tensor = make()
    pending.future.set_exception(RuntimeError("peer failed"))
    assert not work.wait() and not work.wait()
    assert work.get_future().wait() is tensor
    assert [str(e) for e in reports.errors] == ["peer failed"] and tensor.tolist() == [8.0]


def test_future_of_a_collective_that_hangs_ends() -> None:
    work, _, reports, tensor = make(timeout=0.02)
    assert work.get_future().wait() is tensor
    assert len(reports.errors) == 1 and isinstance(reports.errors[0], TimeoutError)


def test_finish_that_fails_is_an_error_of_the_step() -> None:
    work, pending, reports, tensor = make()
    work.on_success = lambda: tensor.div_(torch.ones(2))  # wrong shape
    pending.future.set_result(None)
    assert not work.wait()
    assert len(reports.errors) == 1


def test_late_result_after_a_timeout_changes_nothing() -> None:
    work, pending, reports, tensor = make(timeout=0.02)
    work.get_future().wait()
    pending.future.set_result(None)
    assert not work.wait() and tensor.tolist() == [8.0] and len(reports.errors) == 1


def test_work_is_freed() -> None:
    work, pending, _, _ = make()
    pending.future.set_result(None)
    future = work.get_future()
    future.wait()
    ref = weakref.ref(work)
    del work, pending
    assert isinstance(future, _ManagedFuture)
    del future
    import gc

    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("method", ["synchronize", "block_current_stream"])
def test_on_a_cpu_all_waits_are_the_same(method: str) -> None:
    work, pending, _, tensor = make()
    pending.future.set_result(None)
    getattr(work, method)()
    assert tensor.tolist() == [4.0]


def test_simple_future() -> None:
    future = _SimpleFuture(3)
    assert future.done() and future.wait() == 3 and future.value() == 3
    assert future.then(lambda f: f.value() + 1).wait() == 4


class Aborted(Pending):
    """A collective after an abort: `wait` raises an error at once, but the backend still runs the
    collective.
    """

    over = False

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        raise RuntimeError("aborted")

    def drain(self, timeout: timedelta) -> bool:
        return True  # the collective writes nothing any more, although its thread has not ended

    def ended(self) -> bool:
        return self.over


def test_an_aborted_collective_has_ended_when_the_backend_reports_it() -> None:
    pending, reports = Aborted(), Reports()
    work = _ManagedWork(reports, pending, torch.zeros(1))  # type: ignore[arg-type]
    assert not work.wait() and len(reports.errors) == 1
    assert not work.ended(), "the end of its waits does not suffice, nor that it writes nothing"
    assert work.drain(timedelta(seconds=1))
    pending.over = True
    assert work.ended()
