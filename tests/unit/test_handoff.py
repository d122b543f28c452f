"""Functions run on other threads, also those that the garbage collector hands off."""

from __future__ import annotations

import os
import threading

import pytest

from tests.unit.children import run_python
from torchft import _handoff
from torchft._handoff import drain, hand_off, prepare

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def prepared() -> None:
    prepare()


def test_a_function_runs_on_a_thread_of_its_own() -> None:
    ran: list[tuple[str, bool]] = []
    handed = hand_off(
        lambda: ran.append((threading.current_thread().name, threading.current_thread().daemon)), "mine"
    )
    assert handed.wait(DEADLINE_S) and handed.over
    assert ran == [("mine", True)]


def test_functions_do_not_wait_for_each_other() -> None:
    first, end = threading.Event(), threading.Event()
    slow = hand_off(lambda: (first.set(), end.wait(DEADLINE_S)), "slow")
    assert first.wait(DEADLINE_S)
    assert hand_off(list, "fast").wait(DEADLINE_S)
    assert not slow.over and not drain(0.01)
    end.set()
    assert drain(DEADLINE_S) and slow.over


def test_it_takes_no_lock() -> None:
    """A garbage collection interrupts a thread that holds a lock, which another one may wait for."""
    handed = []

    def collect() -> None:
        with threading._active_limbo_lock, _handoff._starter_lock:  # type: ignore[attr-defined]
            handed.append(hand_off(list, "a"))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert handed[0].wait(DEADLINE_S)


def test_an_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("no more of it")

    assert hand_off(fails, "failing").wait(DEADLINE_S)
    assert "failing" in caplog.text and "no more of it" in caplog.text


def test_where_no_thread_can_be_started_the_function_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert hand_off(list, "a").wait(DEADLINE_S)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_runs_its_own_functions_only() -> None:
    done = run_python(
        """
import os, threading, time
from torchft._handoff import drain, hand_off, prepare

prepare()
end = threading.Event()
slow = hand_off(lambda: end.wait(60), "slow")
if not (pid := os.fork()):
    prepare()
    os._exit(0 if hand_off(list, "a").wait(60) and drain(60) and not slow.over else 1)
print(os.waitpid(pid, 0)[1], slow.over)
end.set()
"""
    )
    assert done.stdout == "0 False\n", done.stderr
