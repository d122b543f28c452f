"""The native library in Python: signals, the GIL, fork, panics, handles, and the end of the process."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from processes import free_port

from tests.promises import CTRL_C_S, within
from torchft import _torchft
from torchft._torchft import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer, QuorumRequest

LONG = timedelta(seconds=60)
MINUTE_US = 60_000_000


@dataclass
class Cluster:
    """A lighthouse that waits for a second group, one group of two ranks, and a peer that never answers."""

    lighthouse: LighthouseServer
    lighthouse_client: LighthouseClient
    manager: ManagerServer
    client: ManagerClient
    silent: str

    def waits(self, timeout: timedelta) -> dict[str, Callable[[], object]]:
        """Returns every call that can wait, each for an event that never happens."""
        return {
            "LighthouseClient.quorum": lambda: self.lighthouse_client.quorum("me", timeout),
            "LighthouseClient": lambda: LighthouseClient(self.silent, timeout),
            "ManagerClient._quorum": lambda: self.client._quorum(
                group_rank=0,
                step=0,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=timeout,
                commit_failures=0,
            ),
            "ManagerClient._begin_round": lambda: self.client._end_round(self.begin_round(timeout)),
            "ManagerClient.should_commit": lambda: self.client.should_commit(0, 0, True, timeout),
            "ManagerClient": lambda: ManagerClient(self.silent, timeout),
            "ManagerServer": lambda: manager_server(self.silent, timeout),
        }

    def begin_round(self, timeout: timedelta) -> object:
        return self.client._begin_round(QuorumRequest(0, 0, "", False, 0), timeout)


WAITS = [
    "LighthouseClient.quorum",
    "LighthouseClient",
    "ManagerClient._quorum",
    "ManagerClient._begin_round",
    "ManagerClient.should_commit",
    "ManagerClient",
    "ManagerServer",
]


def manager_server(lighthouse: str, connect_timeout: timedelta) -> ManagerServer:
    return ManagerServer(
        replica_id="group",
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="127.0.0.1:1",
        world_size=2,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=connect_timeout,
        quorum_retries=0,
    )


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    manager = manager_server(lighthouse.address(), LONG)
    # Accepts connections (the kernel does), but never answers.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield Cluster(
            lighthouse,
            LighthouseClient(lighthouse.address(), LONG),
            manager,
            ManagerClient(manager.address(), LONG),
            f"http://127.0.0.1:{silent.getsockname()[1]}",
        )
        manager.shutdown()
        lighthouse.shutdown()


def native() -> Any:
    return _torchft._load()


def probe(outcome: str, delay_us: int = 0, timeout_us: int = MINUTE_US) -> object:
    return native().run(native().pyapi_ProbeStart, outcome, delay_us, timeout_us)


def present_handles() -> int:
    """Returns the number of live handles, after a garbage collection for those that other tests dropped."""
    gc.collect()
    return native().pyapi_Handles()


def settled_handles(expected: int) -> int:
    """Returns the number of live handles, after cancelled calls have had time to end.

    It may be less than expected, because objects that other tests dropped may end in the meantime.
    """
    deadline = time.monotonic() + 60
    while native().pyapi_Handles() > expected and time.monotonic() < deadline:
        gc.collect()
        threading.Event().wait(0.01)
    return native().pyapi_Handles()


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_ends_a_wait(cluster: Cluster, name: str) -> None:
    with pytest.raises((TimeoutError, RuntimeError)):
        cluster.waits(timedelta(milliseconds=20))[name]()
    handles = present_handles()
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, interrupt)

    def wait() -> None:
        timer.start()  # inside the block, so that the signal is expected even if this thread is delayed
        cluster.waits(LONG)[name]()

    # SIGINT is ignored if the tests run in the background
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        signal.signal(signal.SIGINT, previous)
    took = time.monotonic() - sent[0]
    timer.join()
    assert took < within(CTRL_C_S)
    assert settled_handles(handles) <= handles


def test_ctrl_c_ends_a_process_that_waits(cluster: Cluster) -> None:
    script = """
        import signal, sys
        from datetime import timedelta
        from torchft.coordination import LighthouseClient
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
        client = LighthouseClient(sys.argv[1], timedelta(seconds=60))
        print("connected", flush=True)
        client.quorum("child", timedelta(seconds=60))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), cluster.lighthouse.address()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "connected\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_wait_continues_after_a_signal_handler_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
        timer.start()
        assert probe("value", delay_us=400_000) == "value"
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert seen == [signal.SIGUSR1]


@pytest.mark.parametrize("name", WAITS)
def test_other_threads_run_during_a_wait(cluster: Cluster, name: str) -> None:
    def ticks_during_a_wait(seconds: float) -> list[float]:
        done = threading.Event()
        ticks: list[float] = []

        def tick() -> None:
            while not done.wait(0.005):
                ticks.append(time.monotonic())

        other = threading.Thread(target=tick)
        other.start()
        try:
            with pytest.raises((TimeoutError, RuntimeError)):
                cluster.waits(timedelta(seconds=seconds))[name]()
        finally:
            done.set()
            other.join()
        return ticks

    ticks: list[float] = []
    for seconds in (0.5, 5, 25):  # longer if the machine was too busy
        ticks = ticks_during_a_wait(seconds)
        if len(ticks) >= 5:
            break
    assert len(ticks) >= 5, "some 90 on an idle machine; with the GIL held there would be one or two"


def test_a_panic_is_a_runtime_error_and_the_library_still_works() -> None:
    for outcome in ("panic", "nil-dereference"):
        with pytest.raises(RuntimeError, match="bug in torchft's native library"):
            probe(outcome)
        with pytest.raises(RuntimeError, match="bug in torchft's native library"):
            native().pyapi_ProbeStart("panic-in-start", 0, MINUTE_US)
    assert probe("value") == "value"


def test_errors_have_classes_of_python() -> None:
    with pytest.raises(TimeoutError):
        probe("value", delay_us=MINUTE_US, timeout_us=1000)
    with pytest.raises(RuntimeError, match=r"^probe: something else$"):
        probe("something else")
    with pytest.raises(ValueError, match="log level"):
        native().pyapi_SetLogLevel("loud")
    with pytest.raises(RuntimeError, match="shut down"):
        native().pyapi_Address(10**9)
    with pytest.raises(RuntimeError, match="no such operation"):
        native().run(lambda: 10**9)
    with pytest.raises(TypeError):
        native().run()
    with pytest.raises(ValueError, match="null"):
        probe("nul\0in text")


def test_handles_do_not_leak(cluster: Cluster) -> None:
    handles = present_handles()
    for _ in range(300):
        probe("value")
        with pytest.raises(RuntimeError):
            probe("error")
        with pytest.raises(RuntimeError):
            probe("panic")
        with pytest.raises(RuntimeError):
            cluster.client._checkpoint_metadata(9, LONG)
        with pytest.raises(TimeoutError):
            cluster.client.should_commit(0, 0, True, timedelta(microseconds=1))
    cluster.client.shutdown()
    assert settled_handles(handles - 1) <= handles - 1


def test_calls_from_many_threads_get_their_own_answers(cluster: Cluster) -> None:
    other = ManagerClient(cluster.manager.address(), LONG)
    votes: dict[int, list[bool]] = {0: [], 1: []}

    def vote(client: ManagerClient, rank: int) -> None:
        for step in range(200):
            votes[rank].append(client.should_commit(rank, step, step % 3 != rank, LONG))

    threads = [threading.Thread(target=vote, args=args) for args in ((cluster.client, 0), (other, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert votes[0] == votes[1] == [step % 3 == 2 for step in range(200)]
    other.shutdown()


def test_dropping_the_last_reference_ends_the_native_object(cluster: Cluster) -> None:
    handles = present_handles()
    port = free_port()
    server = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1)
    client = LighthouseClient(server.address(), LONG)
    assert native().pyapi_Handles() <= handles + 2
    del server, client
    assert settled_handles(handles) <= handles
    LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1).shutdown()


def test_a_call_after_shutdown_is_an_error(cluster: Cluster) -> None:
    cluster.client._release()
    with pytest.raises(RuntimeError, match="shut down"):
        cluster.client.should_commit(0, 0, True, LONG)


def test_shutdown_ends_another_thread_s_wait(cluster: Cluster) -> None:
    errors: list[Exception] = []

    def vote() -> None:
        try:
            cluster.client.should_commit(0, 0, True, LONG)
        except Exception as e:
            errors.append(e)

    waiting = threading.Thread(target=vote)
    waiting.start()
    threading.Event().wait(0.2)  # lets the vote arrive; if it arrives later, it fails as well
    cluster.manager.shutdown()
    waiting.join(20)
    assert not waiting.is_alive()
    assert isinstance(errors[0], RuntimeError)


def in_child(work: Callable[[], object]) -> str:
    """Returns what `work` returns or raises in a forked child, which must end within 30 s."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this tests forking with threads
        child = os.fork()
    if child == 0:
        try:
            result = f"returned {work()!r}"
        except BaseException as e:
            result = f"{type(e).__name__}: {e}"
        os.write(write, result.encode())
        os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 30
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the forked child hangs")
        threading.Event().wait(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read()


FORKED = "RuntimeError: torchft's native library was loaded before this process was forked"


def test_every_entry_refuses_a_forked_child(cluster: Cluster) -> None:
    entries = {
        name: getattr(native(), name)
        for name in dir(native())
        if name.startswith("pyapi_") or name in ("run", "open", "post", "collect")
    }
    assert len(entries) > 12
    calls = {**cluster.waits(LONG), **entries, "shutdown": cluster.manager.shutdown}

    def refuse() -> None:
        for name, call in calls.items():
            try:
                call()
                error = "none"
            except Exception as e:
                error = f"{type(e).__name__}: {e}"
            assert error.startswith(FORKED), f"{name}: {error}"
            assert "spawn" in error

    assert in_child(refuse) == "returned None"
    cluster.lighthouse_client.heartbeat("the parent goes on")


def test_destructors_do_nothing_in_a_forked_child(cluster: Cluster) -> None:
    gc.collect()  # the child must not collect objects of other tests
    objects = [cluster.lighthouse_client, cluster.manager]
    cluster.lighthouse_client, cluster.manager = None, None  # type: ignore[assignment]

    def drop() -> str:
        objects.clear()
        gc.collect()
        return "dropped"

    assert in_child(drop) == "returned 'dropped'"
    objects[0].heartbeat("the parent's client works on")
    cluster.lighthouse_client, cluster.manager = objects  # type: ignore[assignment]


def test_a_process_forked_before_the_first_use_can_use_it() -> None:
    script = """
        import os
        from torchft.coordination import LighthouseServer
        child = os.fork()
        LighthouseServer(bind="127.0.0.1:0", min_replicas=1).shutdown()
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60, check=True)


def test_a_daemon_thread_that_waits_does_not_disturb_the_exit() -> None:
    script = """
        import threading
        from datetime import timedelta
        from torchft.coordination import LighthouseClient, LighthouseServer
        server = LighthouseServer(bind="127.0.0.1:0", min_replicas=9)
        clients = [LighthouseClient(server.address(), timedelta(seconds=60)) for _ in range(4)]
        def wait(client, name):
            while True:
                try:
                    client.quorum(name, timedelta(milliseconds=3))
                except TimeoutError:
                    pass
        for i, client in enumerate(clients):
            threading.Thread(target=wait, args=(client, f"me{i}"), daemon=True).start()
        threading.Event().wait(0.2)
        print("main ends")
    """
    for _ in range(3):
        command = [sys.executable, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "main ends\n", "")


@pytest.mark.slow
def test_an_operation_that_outlives_the_thread_that_waits_for_it() -> None:
    """While the interpreter ends, daemon threads end in their waits, and the calls end later."""
    script = """
        import sys, threading, time
        from torchft._torchft import _load
        go = _load()
        threading.stack_size(64 << 20)  # more than libc keeps of ended threads: the stack is unmapped at once
        def wait(delay_us):
            go.run(go.pyapi_ProbeStart, "value", delay_us, 60_000_000)
        for i in range(4):
            threading.Thread(target=wait, args=(2_000_000 + i * 100_000,), daemon=True).start()
        time.sleep(0.3)
        class Last:
            def __del__(self, sleep=time.sleep, write=sys.stdout.write, flush=sys.stdout.flush):
                sleep(3)
                write("last")
                flush()
        sys.last = Last()  # is deleted when only the main thread still runs Python
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "last", "")


def test_a_data_loader_with_forked_workers_works(cluster: Cluster) -> None:
    torch_data = pytest.importorskip("torch.utils.data")

    class Numbers(torch_data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            return index

    class Misuse(Numbers):
        def __getitem__(self, index: int) -> int:
            cluster.lighthouse_client.heartbeat("worker")
            return index

    def load(dataset: object) -> list[int]:
        loader = torch_data.DataLoader(dataset, num_workers=2, multiprocessing_context="fork", timeout=60)
        return sorted(int(x) for batch in loader for x in batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this tests forking with threads
        assert load(Numbers()) == list(range(8))
        with pytest.raises(RuntimeError, match="was forked") as raised:
            load(Misuse())
    # The error and its frames refer to each other, and the frames refer to the loader. If the garbage
    # collector destroyed the loader, it might destroy the queues before the workers; then the loader would
    # wait 5 s for each worker, in a later test.
    traceback.clear_frames(raised.tb)
    cluster.lighthouse_client.heartbeat("the parent goes on")
