"""Timeouts of futures, blocks and streams, and the one thread that runs their callbacks."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import weakref
from datetime import timedelta
from functools import partial
from typing import Iterator
from unittest.mock import patch

import pytest
from torch.futures import Future

from tests.unit.children import run_python
from tests.unit.waiting import wait_until
from torchft import futures
from torchft.futures import (
    WATCHDOG_TIMEOUT_SEC,
    _TimeoutManager,
    context_timeout,
    future_timeout,
    future_wait,
    stream_timeout,
)

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=20)


@pytest.fixture
def timers() -> Iterator[_TimeoutManager]:
    manager = _TimeoutManager()
    yield manager
    manager.shutdown()


def failing(error: Exception) -> Future[int]:
    fut: Future[int] = Future()
    fut.set_exception(error)  # type: ignore[arg-type]
    return fut


def test_future_timeout_passes_the_result_on() -> None:
    fut: Future[int] = Future()
    timed = future_timeout(fut, LONG)
    assert not timed.done()
    fut.set_result(7)
    assert timed.wait() == 7


def test_future_timeout_passes_an_error_on() -> None:
    fut: Future[int] = Future()
    timed = future_timeout(fut, LONG)
    fut.set_exception(KeyError("lost"))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="lost"):
        timed.wait()


def test_future_timeout_expires_and_ignores_a_later_result() -> None:
    fut: Future[int] = Future()
    timed = future_timeout(fut, SHORT)
    with pytest.raises(TimeoutError, match=r"within 0\.02 s"):
        timed.wait()
    fut.set_result(7)
    assert fut.wait() == 7
    with pytest.raises(TimeoutError):
        timed.value()


def test_future_timeout_of_a_finished_future_is_immediate() -> None:
    fut: Future[int] = Future()
    fut.set_result(7)
    assert future_timeout(fut, timedelta(0)).value() == 7
    with pytest.raises(KeyError):
        future_timeout(failing(KeyError()), timedelta(0)).value()


def test_future_wait() -> None:
    fut: Future[int] = Future()
    with pytest.raises(TimeoutError, match=r"within 0\.02 s"):
        future_wait(fut, SHORT)
    with pytest.raises(TimeoutError):
        future_wait(fut, timedelta(seconds=-1))
    threading.Timer(0.01, fut.set_result, (7,)).start()
    assert future_wait(fut, LONG) == 7
    assert future_wait(fut, timedelta(0)) == 7
    with pytest.raises(KeyError):
        future_wait(failing(KeyError()), LONG)


def test_context_timeout_calls_back_while_the_block_continues() -> None:
    called = threading.Event()
    with context_timeout(called.set, SHORT):
        assert called.wait(10)


def test_context_timeout_of_a_block_in_time_never_calls_back(timers: _TimeoutManager) -> None:
    in_time = False
    while not in_time:  # on a busy machine a block may take longer than its deadline
        called, began = threading.Event(), time.monotonic()
        with context_timeout(called.set, SHORT):
            pass
        with pytest.raises(KeyError), context_timeout(called.set, SHORT):
            raise KeyError
        in_time = time.monotonic() - began < SHORT.total_seconds()
    # A later timer has fired, so an earlier one would have fired, too.
    later = threading.Event()
    with context_timeout(later.set, 2 * SHORT):
        assert later.wait(10)
    assert not called.is_set()


@pytest.mark.no_device
def test_context_timeout_as_a_decorator_has_a_timer_for_each_call(timers: _TimeoutManager) -> None:
    called: list[int] = []
    passed = threading.Event()

    def late() -> None:
        called.append(1)
        passed.set()

    @context_timeout(late, SHORT)  # type: ignore[operator]
    def slow() -> None:
        assert passed.wait(LONG.total_seconds())
        passed.clear()

    slow()
    slow()
    assert called == [1, 1]


def test_stream_timeout_watches_nothing_without_an_accelerator() -> None:
    called, later = threading.Event(), threading.Event()
    stream_timeout(called.set, timedelta(0))
    with context_timeout(later.set, SHORT):  # fires after a timer of `stream_timeout`
        assert later.wait(10)
    assert not called.is_set()


def test_timers_run_in_the_order_of_their_deadlines(timers: _TimeoutManager) -> None:
    in_time = False
    while not in_time:  # a timeout begins with the call, so a delayed call may fire last
        order: list[int] = []
        done, began = threading.Event(), time.monotonic()
        timers.schedule(timedelta(milliseconds=60), done.set)
        timers.schedule(timedelta(milliseconds=40), partial(order.append, 2))
        timers.schedule(timedelta(milliseconds=20), partial(order.append, 1))
        in_time = time.monotonic() - began < 0.02
        assert done.wait(10)
    assert order == [1, 2]


def test_a_callback_that_raises_does_not_stop_the_others(
    timers: _TimeoutManager, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise KeyError("broken")

    done = threading.Event()
    timers.schedule(timedelta(0), broken)
    timers.schedule(SHORT, done.set)
    assert done.wait(10)
    assert "a timeout callback raised" in caplog.text


def test_a_callback_may_set_timers(timers: _TimeoutManager) -> None:
    done = threading.Event()
    timers.schedule(timedelta(0), lambda: timers.schedule(timedelta(0), done.set) and None)
    assert done.wait(10)


def test_cancelled_timers_keep_nothing_alive_and_are_dropped(timers: _TimeoutManager) -> None:
    class Big:
        def callback(self) -> None:
            pass

    big = Big()
    freed = weakref.ref(big)
    timers.schedule(LONG, big.callback).cancel()
    del big
    gc.collect()
    assert freed() is None

    called = threading.Event()
    timers.schedule(LONG, called.set)
    for i in range(10_000):
        timers.schedule((i % 3 + 1) * LONG, lambda: None).cancel()
    assert len(timers.pending) == 1
    assert not called.is_set()


def test_steps_of_many_operations_wake_it_once(
    timers: _TimeoutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "_TIMEOUT_MANAGER", timers)
    with patch.object(timers._cond, "notify", wraps=timers._cond.notify) as notify:
        for step in range(3):
            buckets: list[Future[int]] = [Future() for _ in range(100)]
            ended = []
            for bucket in buckets:
                with context_timeout(print, LONG):
                    ended.append(future_timeout(bucket, LONG))
            for bucket in buckets:
                bucket.set_result(step)
            assert {each.wait() for each in ended} == {step}
    assert notify.call_count == 1
    assert not timers.pending


def test_each_deadline_passes_once_and_in_order(timers: _TimeoutManager) -> None:
    order: list[int] = []
    done = threading.Event()
    held = timers.schedule(timedelta(0), lambda: done.wait(10) and None)  # until all are set
    for i in (3, 1, 2, 0):
        deadline = timers.schedule(i * SHORT, lambda i=i: order.append(i))  # type: ignore[misc]
        if i == 2:
            deadline.cancel()
    last = threading.Event()
    timers.schedule(3 * SHORT, last.set)
    done.set()
    assert last.wait(10) and not held.take()
    assert order == [0, 1, 3]
    assert not timers.pending
    last.clear()
    timers.schedule(SHORT, last.set)
    assert last.wait(10)


def test_a_deadline_set_by_the_garbage_collector_waits_for_no_other_thread(timers: _TimeoutManager) -> None:
    """It may run on a thread that sets a timer, while another thread sets a deadline."""

    def add(timeout: timedelta) -> None:
        timers.schedule(timeout, print)

    def collect() -> None:
        with timers._cond:
            other.start()
            wait_until(lambda: bool(timers.pending))
            add(LONG)

    other = threading.Thread(target=add, args=(2 * LONG,), daemon=True)
    one = threading.Thread(target=collect, daemon=True)
    one.start()
    for thread in (one, other):
        thread.join(20)
    assert not one.is_alive() and not other.is_alive()


def test_deadlines_are_not_lost_with_their_thread(timers: _TimeoutManager) -> None:
    done = threading.Event()
    timers.schedule(SHORT, print).cancel()
    timers.shutdown()
    timers.schedule(SHORT, done.set)
    assert done.wait(10)


def test_a_cancelled_timer_spares_the_next_one_a_wake(timers: _TimeoutManager) -> None:
    """Otherwise the thread wakes for each operation, and competes for the GIL."""
    with timers._cond:  # until both calls have returned, the thread waits for the lock
        timers.schedule(LONG, print).cancel()
    wait_until(lambda: timers._cond._waiters)  # type: ignore[attr-defined]
    with patch.object(timers._cond, "notify") as notify:
        timers.schedule(LONG, print)
    assert not notify.called


def test_the_thread_starts_on_first_use_and_stops(timers: _TimeoutManager) -> None:
    assert timers._thread is None
    called = threading.Event()
    timers.schedule(LONG, called.set)
    thread = timers._thread
    assert thread is not None and thread.is_alive()
    timers.shutdown()
    assert not thread.is_alive()

    done = threading.Event()
    timers.schedule(timedelta(0), done.set)
    assert done.wait(10)
    assert not called.is_set()


def test_many_threads_share_the_timers() -> None:
    def work() -> None:
        for i in range(200):
            fut: Future[int] = Future()
            timed = future_timeout(fut, LONG)
            fut.set_result(i)
            results.append(timed.wait() == i)

    results: list[bool] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 800 and all(results)


def _expire_in_child(queue: multiprocessing.SimpleQueue[str]) -> None:
    try:
        future_timeout(Future(), SHORT).wait()
    except TimeoutError:
        queue.put("expired")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_its_own_timers() -> None:
    with context_timeout(lambda: None, LONG):  # the parent's thread is running
        context = multiprocessing.get_context("fork")
        queue: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
        child = context.Process(target=_expire_in_child, args=(queue,), daemon=True)
        child.start()
        child.join(30)
    assert child.exitcode == 0
    assert queue.get() == "expired"


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan"])
def test_a_bad_watchdog_timeout_is_named(
    value: str, timers: _TimeoutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WATCHDOG_TIMEOUT_SEC, value)
    with pytest.raises(ValueError, match=f"{WATCHDOG_TIMEOUT_SEC}='{value}': a positive number"):
        timers.schedule(LONG, lambda: None)


def test_the_watchdog_spares_a_callback_that_returns(
    timers: _TimeoutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()
    monkeypatch.setattr(futures, "_end_process", lambda *args: ends.set())
    monkeypatch.setenv(WATCHDOG_TIMEOUT_SEC, "30")
    done = threading.Event()
    timers.schedule(timedelta(0), done.set)
    assert done.wait(10)
    timers.shutdown()
    assert not ends.is_set()


_HUNG = """
import threading
from datetime import timedelta
from torchft.futures import context_timeout

with context_timeout(threading.Event().wait, timedelta(milliseconds=1)):
    threading.Event().wait(600)
"""


def test_the_watchdog_ends_a_process_whose_callback_hangs() -> None:
    process = run_python(_HUNG, env={WATCHDOG_TIMEOUT_SEC: "0.2"})
    assert process.returncode == 1
    assert "did not return within 0.2 s" in process.stderr
    assert "most recent call first" in process.stderr  # the stacks


def test_pending_timers_do_not_delay_the_end_of_the_process() -> None:
    code = (
        "from datetime import timedelta; from torch.futures import Future\n"
        "from torchft.futures import future_timeout\n"
        "future_timeout(Future(), timedelta(seconds=600)); print('end')"
    )
    process = run_python(code, timeout=60)
    assert (process.returncode, process.stdout) == (0, "end\n"), process.stderr
