"""A signal drains the group: the handler sets a flag, and a thread enforces the grace period."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any, Callable, Optional

import pytest

from tests.unit.waiting import wait_until
from torchft._manager import signals as module
from torchft._manager.signals import SAME_REQUEST_SEC, DrainDeadline, Signals, leave_on_from_env
from torchft._torchft import QuorumResult

Quorum = Callable[..., QuorumResult]
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2
LONG_S = 60


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Saves the handlers of this process, and restores them after a test."""
    before = {number: signal.getsignal(number) for number in (USR1, USR2, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    module._installed.clear()
    module._end_watch()
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "torchft_signals"]


@pytest.mark.parametrize(
    ("at", "now", "left", "over"),
    [
        ([], 100.0, None, ""),
        ([10.0], 10.0, 25.0, ""),
        ([10.0], 34.9, 0.1, ""),
        ([10.0], 35.0, 0.0, "the grace period of TORCHFT_GRACE_S=25 s is over"),
        (
            [10.0, 10.1, 10.0 + SAME_REQUEST_SEC - 0.1],
            16.0,
            19.0,
            "",
        ),  # from torchrun and from Slurm: one request
        ([10.0, 10.0 + SAME_REQUEST_SEC], 16.0, 19.0, "a second signal arrived"),
    ],
)
def test_when_the_process_ends_at_once(at: list[float], now: float, left: Optional[float], over: str) -> None:
    deadline = DrainDeadline(25.0)
    for arrived in at:
        deadline.asked(arrived)
    assert deadline.left(now) == (None if left is None else pytest.approx(left))
    assert deadline.over(now) == over


def test_the_handler_sets_a_flag_and_the_next_request_carries_it(fixture: Any, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    manager.leave_on(USR1, USR2)
    manager.start_quorum()
    signal.raise_signal(USR2)
    assert manager._signals.wanted
    manager.wait_quorum()
    assert manager.should_commit() and not manager.draining(), "the server does not know of it"
    assert fixture.client._quorum.call_count == 1


def test_a_rank_reports_its_signal(
    fixture: Any, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = fixture.manager()
    drains: list[bool] = []
    begin = manager._rounds.begin

    def record(follow: Any, request: Any, timeout: Any) -> Any:
        drains.append(request.drain)
        fixture.client._quorum.return_value = make_quorum(draining=request.drain)
        return begin(follow, request, timeout)

    monkeypatch.setattr(manager._rounds, "begin", record)
    manager.leave_on(USR1)
    manager.start_quorum()
    signal.raise_signal(USR1)  # during the step, so too late for its quorum
    assert manager.should_commit() and not manager.draining()
    manager.start_quorum()
    assert manager.should_commit() and manager.draining()
    assert drains == [False, True]
    manager.shutdown()
    assert signal.getsignal(USR1) == manager._signals._handle, "the signal must not end its last checkpoint"


def test_the_handler_of_the_script_is_called_and_restored(fixture: Any) -> None:
    calls: list[int] = []

    def scripts(number: int, frame: Optional[FrameType]) -> None:
        calls.append(number)

    signal.signal(USR1, scripts)
    manager = fixture.manager()
    manager.leave_on(USR1)
    manager.leave_on(USR1, USR2)  # another call changes nothing
    assert signal.getsignal(USR1) == signal.getsignal(USR2) == manager._signals._handle
    assert module.installed() == [USR1, USR2]
    manager.shutdown()
    assert signal.getsignal(USR1) is scripts and signal.getsignal(USR2) is signal.SIG_DFL
    assert module.installed() == [] and signal.set_wakeup_fd(-1) == -1
    signal.raise_signal(USR1)
    assert calls == [USR1] and not manager._signals.wanted

    manager = fixture.manager()
    manager.leave_on(USR1)
    signal.raise_signal(USR1)
    assert calls == [USR1, USR1] and manager._signals.wanted


def test_a_process_of_torchft_run_drains_on_a_signal_if_its_script_calls_draining(
    fixture: Any, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_LEAVE_ON", "SIGUSR1, SIGUSR2")
    manager = fixture.manager()
    manager.start_quorum()
    assert manager.should_commit() and module.installed() == [], (
        "a script that never calls draining() would never leave"
    )
    assert on_another_thread(manager.draining) is None and module.installed() == []
    assert not manager.draining() and module.installed() == [USR1, USR2]
    signal.raise_signal(USR2)
    assert manager._signals.wanted

    ended = fixture.manager()
    ended.shutdown()
    assert not ended.draining() and ended._signals not in module._installed


def test_an_empty_setting_replaces_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert leave_on_from_env() == () and leave_on_from_env(signal.SIGTERM) == (signal.SIGTERM,)
    monkeypatch.setenv("TORCHFT_LEAVE_ON", "SIGUSR1")
    assert leave_on_from_env(signal.SIGTERM) == (USR1,)
    monkeypatch.setenv("TORCHFT_LEAVE_ON", "")
    assert leave_on_from_env(signal.SIGTERM) == ()


@pytest.mark.parametrize("text", ["SIGKILL", "TERM", "SIGTERM SIGINT", "15"])
def test_invalid_default_signals(fixture: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TORCHFT_LEAVE_ON", text)
    with pytest.raises(
        ValueError, match=f"TORCHFT_LEAVE_ON='{text}' is not allowed; allowed: names of signals"
    ):
        fixture.manager()


def test_two_managers_of_a_process_both_get_a_signal(fixture: Any) -> None:
    first, second = fixture.manager(), fixture.manager()
    first.leave_on(USR1)
    second.leave_on(USR1)
    first.shutdown()
    third = fixture.manager()
    third.leave_on(USR1)
    signal.raise_signal(USR1)
    assert second._signals.wanted and third._signals.wanted
    second.shutdown()
    third.shutdown()
    assert module.installed() == [USR1]


def test_ctrl_c_does_not_interrupt_a_draining_process(fixture: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        manager = fixture.manager()
        manager.leave_on(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert manager._signals.wanted
    finally:
        signal.signal(signal.SIGINT, before)


def wait_until_received() -> None:
    """Waits until the thread that enforces the grace period has received the signal."""
    watch = module._watch
    assert watch is not None
    wait_until(lambda: watch._deadline.left(0.0) is not None)


class Process:
    """The exit of this process, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self.ended = [0.0], queue.SimpleQueue[int]()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.times[-1]))
        monkeypatch.setattr(module.os, "_exit", self.ended.put)


def test_a_second_signal_ends_the_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(monkeypatch)
    times, ended = process.times, process.ended
    handlers = Signals()
    handlers.install((USR1,))
    signal.raise_signal(USR1)
    wait_until_received()
    times.append(SAME_REQUEST_SEC)
    signal.raise_signal(USR1)
    assert ended.get(timeout=LONG_S) == 128 + USR1
    assert "SIGUSR1: a second signal arrived: the process ends now, with status 138" in capfd.readouterr().err


def test_a_handler_that_the_script_installs_later_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may need longer than the grace period, or ignore the signal. torchft must not end its
    process then.
    """
    process = Process(monkeypatch)
    times, ended = process.times, process.ended
    handlers = Signals()
    handlers.install((USR1, USR2))
    signal.signal(USR1, lambda number, frame: None)

    def twice(number: int) -> None:
        """Sends a signal twice, as two requests. The second one ends the process, like the end of the grace
        period.
        """
        signal.raise_signal(number)
        wait_until_received()
        times.append(times[-1] + SAME_REQUEST_SEC)
        signal.raise_signal(number)

    twice(USR1)
    # until the thread has forgotten the signals
    wait_until(lambda: module._watch is None or module._watch._deadline.left(0.0) is None)
    assert ended.empty()
    twice(USR2)
    assert ended.get(timeout=LONG_S) == 128 + USR2 and ended.empty()
    assert handlers.wanted


def test_the_previous_wakeup_file_descriptor_gets_all_signals() -> None:
    """For example, asyncio sets one."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    handlers = Signals()
    handlers.install((USR1,))
    signal.raise_signal(USR1)
    assert select.select([read], [], [], LONG_S)[0] and os.read(read, 9) == bytes([USR1])
    module._end_watch()
    assert signal.set_wakeup_fd(-1) == write
    os.close(read)
    os.close(write)


def on_another_thread(call: Callable[[], object]) -> Optional[BaseException]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, name="a loader")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_leave_on_works_on_the_main_thread_only(fixture: Any) -> None:
    manager = fixture.manager()
    error = on_another_thread(lambda: manager.leave_on(USR1))
    assert isinstance(error, RuntimeError)
    assert str(error).startswith(
        "leave_on() was called on the thread 'a loader': Python lets only the main thread"
    )
    assert signal.getsignal(USR1) is signal.SIG_DFL

    # A Manager that is shut down on another thread cannot restore handlers. So the handler does that itself
    # at the next signal, and passes the signal on.
    calls: list[int] = []
    signal.signal(USR1, lambda number, frame: calls.append(number))
    manager.leave_on(USR1)
    assert on_another_thread(manager.shutdown) is None
    assert module.installed() == []
    signal.raise_signal(USR1)
    assert calls == [USR1] and not manager._signals.wanted
    assert signal.getsignal(USR1) != manager._signals._handle


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((), r"leave_on\(\): no signal is given"),
        ((signal.SIGKILL,), r"leave_on\(SIGKILL\): no process can handle it"),
        ((4711,), r"leave_on\(4711\): no such signal"),
    ],
)
def test_invalid_signals(fixture: Any, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fixture.manager().leave_on(*numbers)


@pytest.mark.parametrize(
    ("grace", "message"),
    [("soon", "TORCHFT_GRACE_S='soon' is no integer"), ("0", "TORCHFT_GRACE_S=0s: must be longer than 0s")],
)
def test_a_bad_grace_period(fixture: Any, monkeypatch: pytest.MonkeyPatch, grace: str, message: str) -> None:
    monkeypatch.setenv("TORCHFT_GRACE_S", grace)
    with pytest.raises(ValueError, match=message):
        fixture.manager().leave_on(USR1)
    assert signal.getsignal(USR1) is signal.SIG_DFL


FORKS = """
import multiprocessing, os, signal, sys, time
from torchft._manager import signals
signal.signal(signal.SIGTERM, signal.SIG_DFL)
handlers = signals.Signals()
handlers.install((signal.SIGTERM,))
for _ in range(20):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    child.terminate()  # as any pool does; mostly before the child has run
    child.join()
    assert child.exitcode == -signal.SIGTERM, child.exitcode
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
assert signals._watch._deadline.left(0.0) is None and not handlers.wanted, "it is not for the parent"
"""


def test_a_child_can_be_terminated() -> None:
    assert subprocess.run([sys.executable, "-c", FORKS], timeout=LONG_S).returncode == 0


HANGS = """
import ctypes, os, resource, signal
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most), most))
while os.dup(0) < 1100:  # as a trainer with many files and connections
    pass
from torchft._manager.signals import Signals
Signals().install((signal.SIGTERM,))
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
print("ready", flush=True)
libc.pthread_mutex_lock(mutex)  # for ever, and no handler runs meanwhile
"""


def test_a_process_that_hangs_outside_of_python_ends() -> None:
    env = {**os.environ, "TORCHFT_GRACE_S": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HANGS], env=env, text=True, **pipes) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=LONG_S)
    assert child.returncode == 128 + signal.SIGTERM
    assert (
        "SIGTERM: the grace period of TORCHFT_GRACE_S=1 s is over: the process ends now, with status 143"
        in errors
    )
