"""The fork server and standby workers: start, replacement, and the absence of leaks."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import START_TIMEOUT_S, Job, ours_path
from torch.distributed import ReduceOp, TCPStore

from tests.unit.process_group.isolated.processes import (
    STANDBY_TOO,
    children,
    ready_worker,
    server,
    standing_by,
    stop,
    wait_until,
    workers,
)
from tests.unit.process_group.isolated.refusing import ProcessGroupBabyRefusing, ProcessGroupBabyReporting
from tests.unit.process_group.ranks import TIMEOUT, in_threads, meeting
from torchft.process_group import ProcessGroup, ProcessGroupBabyGloo
from torchft.process_group.isolated import channel as channel_module
from torchft.process_group.isolated import server as server_module
from torchft.process_group.isolated import standby


@pytest.mark.slow
def test_reconfigurations_leak_nothing(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)

    def configure() -> None:
        group.configure(meeting(store), "replica", 0, 1)
        group.allreduce([torch.ones(4)], ReduceOp.SUM).wait()

    def leftovers() -> tuple[int, int, int, int]:
        # The latest standby may not have started yet, and the previous worker may not have ended yet.
        wait_until(lambda: len(children(server())) == 2 and standing_by(group), "two workers")
        gc.collect()
        maps = Path("/proc/self/maps").read_text()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir(f"/proc/{server()}/fd")),
            maps.count("memfd:torchft"),
            len([thread for thread in threading.enumerate() if "isolated" in thread.name]),
        )

    for _ in range(3):
        configure()
    before = leftovers()
    for i in range(25):
        if i % 5 == 0:
            # In the middle of an operation
            group.allreduce([torch.ones(1 << 18)], ReduceOp.SUM)
        configure()
    # Remains of other tests in this process may end in the meantime.
    wait_until(lambda: all(now <= then for now, then in zip(leftovers(), before)), "nothing is left")
    group.shutdown()
    wait_until(lambda: not workers(), "both workers end")


TRAINER = r"""
import os, sys, time
import torch
from torch.distributed import ReduceOp, TCPStore
from torchft.process_group import ProcessGroupBabyGloo
from torchft.process_group.isolated import standby
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
group = ProcessGroupBabyGloo(20.0)
group.configure(f"localhost:{store.port}/x", "replica", 0, 1)
group.allreduce([torch.ones(4)], ReduceOp.SUM).wait()
if os.fork() == 0:  # a data loader's process, say, that outlives the trainer
    try:
        group.allreduce([torch.ones(4)], ReduceOp.SUM)
    except RuntimeError as e:
        os.write(1, b'{"event": "refused", "why": "%s"}\n' % str(e).encode())  # in one piece
    time.sleep(20)
    os._exit(0)
os.write(1, b'{"event": "trains", "server": %d}\n' % standby.servers._server.process.pid)
time.sleep(60)
"""


def test_all_processes_end_with_a_killed_trainer(tmp_path: Path) -> None:
    """They also end while a child of the trainer still runs, which has inherited all descriptors."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    with Job() as job:
        trainer = job.python("trainer", tmp_path / "trainer.py", path=ours_path())
        job.wait(
            lambda: trainer.of("refused") and trainer.of("trains"),
            START_TIMEOUT_S,
            "it trains, and has a child",
        )
        assert "a forked process cannot use its parent's group" in trainer.of("refused")[0]["why"]
        pid = trainer.of("trains")[0]["server"]
        wait_until(lambda: len(children(pid)) == 2, "a worker and a standby")
        everything = [pid, *children(pid)]
        os.kill(trainer.pid, signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{p}").exists() for p in everything), "all have ended")


def test_the_standby_worker_becomes_the_next_worker(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    ready = ready_worker()
    group.configure(meeting(store), "replica", 0, 1)
    assert ready in workers()
    wait_until(lambda: len(workers()) == 2, "the next one stands by")
    group.shutdown()
    group.shutdown()
    wait_until(lambda: not workers(), "both end")


def test_without_a_standby(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_ISOLATED_STANDBY", "0")
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    assert len(workers()) == 1
    group.shutdown()


def test_a_standby_that_ended_is_replaced(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    ready = ready_worker()
    os.kill(ready, signal.SIGKILL)
    wait_until(lambda: ready not in workers(), "it has ended")
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


def test_a_server_that_ended_is_replaced(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    old = server()
    os.kill(old, signal.SIGKILL)
    # The kernel ends the worker with its server.
    wait_until(lambda: group.errored() is not None, "the group notices")
    with pytest.raises(RuntimeError, match="the worker process has ended"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    group.configure(meeting(store), "replica", 0, 1)
    assert server() != old
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


def test_a_standby_whose_end_is_not_noticed_yet_is_replaced(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby may end just before it is checked, for example together with its server."""
    group = ProcessGroupBabyGloo(TIMEOUT)
    ready = ready_worker()
    os.kill(ready, signal.SIGKILL)
    wait_until(lambda: ready not in workers(), "it has ended")
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


# Slow, because the next server imports PyTorch. In `make test`, test_a_server_that_ended_is_replaced starts
# the next server, and test_a_standby_whose_end_is_not_noticed_yet_is_replaced repeats a request whose worker
# has ended.
@pytest.mark.slow
@pytest.mark.parametrize("standby_too", [False, True])
def test_a_server_that_ends_during_a_request_is_replaced(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, standby_too: bool
) -> None:
    """The request for a worker is lost with it."""
    group = ProcessGroupBabyGloo(TIMEOUT, standby=standby_too)
    if standby_too:
        wait_until(lambda: len(workers()) == 1, "it stands by")
    old = server()
    stop(old)
    for pid in workers():
        stop(pid)
    asked = threading.Event()
    request = channel_module.Channel.request

    def notify(channel: Any, *args: Any) -> Any:
        op = request(channel, *args)
        asked.set()
        return op

    monkeypatch.setattr(channel_module.Channel, "request", notify)

    def kill() -> None:
        assert asked.wait(20)
        os.kill(old, signal.SIGKILL)

    results = in_threads([lambda: group.configure(meeting(store), "replica", 0, 1), kill])
    assert results == [None, None]
    assert server() != old
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


@pytest.mark.slow  # the next server imports PyTorch for two seconds; a server that failed is replaced above
def test_a_server_that_has_ended_and_counts_as_alive_is_replaced(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process counts as alive until the kernel has ended it."""
    group = ProcessGroupBabyGloo(TIMEOUT, standby=False)
    old = standby.servers.get()
    os.kill(old.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, old.process.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(old.process, "poll", lambda: None)
    group.configure(meeting(store), "replica", 0, 1)
    assert server() != old.process.pid
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


@pytest.mark.slow  # test_a_server_that_ended_is_replaced
@pytest.mark.parametrize("standby_too", STANDBY_TOO)
def test_a_stalled_server_is_replaced(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch, standby_too: bool
) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT, standby=standby_too)
    old = server()
    stop(old)
    for pid in workers():
        stop(pid)
    monkeypatch.setattr(standby, "_START_SEC", 0.3)

    def configure() -> None:
        group.configure(meeting(store), "replica", 0, 1)

    try:
        with pytest.raises(RuntimeError, match=r"timed out after .* seconds: it did not start"):
            (group.get_reconfigure_handle if standby_too else configure)()
        monkeypatch.undo()
        configure()
        assert server() != old
        group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
        group.shutdown()
        # Like the end of the process; groups that a failed test has left do not count
        standby.servers.close()
        # On a busy machine, kill may return before the process can be reaped
        wait_until(lambda: children(os.getpid()).get(old, "Z") == "Z", "it is killed")
    finally:
        if children(os.getpid()).get(old) == "T":  # otherwise the next tests would wait for it
            os.kill(old, signal.SIGKILL)


@pytest.mark.slow
def test_workers_that_end_repeatedly_are_an_error(store: TCPStore) -> None:
    # Not imported above, because workers import this module in other tests.
    from tests.unit.process_group.isolated.exiting import ProcessGroupBabyExiting

    group = ProcessGroupBabyExiting(TIMEOUT)
    with pytest.raises(RuntimeError, match="exiting: the worker process has ended"):
        group.configure(meeting(store), "replica", 0, 1)
    with pytest.raises(RuntimeError, match="exiting: the worker process has ended"):
        group.get_reconfigure_handle()
    group.shutdown()


def test_an_abort_while_the_worker_starts(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT, standby=False)
    pid = server()
    stop(pid)

    def abort() -> None:
        wait_until(lambda: group._worker is not None, "it is asked")
        group.abort()

    try:
        error, _ = in_threads([lambda: group.configure(meeting(store), "replica", 0, 1), abort])
    finally:
        os.kill(pid, signal.SIGCONT)
    assert isinstance(error, RuntimeError) and "was aborted" in str(error)
    group.shutdown()


def test_a_group_that_is_collected_while_its_thread_holds_the_locks(store: TCPStore) -> None:
    """The garbage collector may run on any thread, where it ends groups without references."""
    group: Any = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    channel = group._worker
    group.itself = group

    def collect() -> None:
        with standby.servers._lock, channel._send_lock, channel._lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    del group
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    wait_until(lambda: channel.broken is not None, "the group is ended on another thread")
    wait_until(lambda: not workers(), "its workers end")


def test_a_standby_is_small(alone: ProcessGroup) -> None:
    wait_until(lambda: len(workers()) == 2, "one works and one stands by")
    for pid in workers():
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private"))
        print(f"private memory: {private / 1000:.0f} MB")
        assert private < 100_000, f"{private} kB"


def test_the_worker_has_neither_the_native_library_nor_the_users_script(store: TCPStore) -> None:
    group = ProcessGroupBabyReporting(TIMEOUT)
    with pytest.raises(RuntimeError, match=r"LookupError: loaded: \[\], main: None"):
        group.configure(meeting(store), "replica", 0, 1)
    group.shutdown()


def test_the_workers_own_error_reaches_the_caller(store: TCPStore) -> None:
    group = ProcessGroupBabyRefusing(TIMEOUT)
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room for a group"):
            group.configure(meeting(store), "replica", 0, 1)
        assert group.size() == -1
        with pytest.raises(AssertionError, match="not initialized"):
            group.allreduce([torch.ones(1)], ReduceOp.SUM)
    group.shutdown()


def test_the_error_of_a_worker_that_cannot_be_forked_names_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", fork)
    channel = channel_module.Channel("a group", {})
    with channel.theirs:
        server_module.spawn({}, channel.theirs, channel.theirs, None)
    wait_until(lambda: channel.broken is not None, "the reader has the error")
    assert "the worker could not be forked: [Errno 12] Cannot allocate memory" in str(channel.broken)


def test_a_class_that_the_worker_cannot_find(store: TCPStore) -> None:
    class Local(ProcessGroupBabyGloo):
        pass

    group = Local(TIMEOUT)
    with pytest.raises(RuntimeError, match="<locals>"):
        group.configure(meeting(store), "replica", 0, 1)
    group.shutdown()


def test_the_end_of_a_worker_is_noticed_while_nothing_reads_its_answers(store: TCPStore) -> None:
    """Only streams wait for it."""
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    worker = group._worker
    assert worker is not None
    worker.kill()
    wait_until(lambda: worker.broken is not None, "the end is noticed")
    assert "the worker process has ended" in str(group.errored())
    group.shutdown()


def test_streams_are_freed_from_a_worker_that_does_not_end(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process may hang in a driver."""
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    worker = group._worker
    assert worker is not None
    done: list[str] = []
    monkeypatch.setattr(worker, "_has_ended", lambda: False)
    monkeypatch.setattr(worker.devices, "free_streams", lambda: done.append("streams"))
    monkeypatch.setattr(worker.devices, "close", lambda: done.append("memory"))
    group.abort()
    wait_until(lambda: bool(done), "the streams are freed")
    assert done == ["streams"], "the worker may still write to the memory"
    group.shutdown()


def test_a_class_in_the_users_script() -> None:
    group = type("Scripted", (ProcessGroupBabyGloo,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="Scripted is defined in __main__"):
        group()


def test_a_worker_with_another_pytorch_is_refused(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read other dtypes than the trainer writes."""
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    group = ProcessGroupBabyGloo(timeout=TIMEOUT)
    with pytest.raises(
        RuntimeError, match=r"the worker has imported PyTorch 2\.\d+.*and the trainer has PyTorch 2\.0\.0"
    ):
        group.configure(meeting(store), "replica", 0, 1)
    group.shutdown()


def test_waiting_for_absent_peers_ends(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(timedelta(milliseconds=300))
    with pytest.raises(TimeoutError, match=r"timed out after 0\.3 seconds"):
        group.configure(meeting(store), "replica", 0, 2)
    group.shutdown()


def test_operations_after_a_shutdown_say_that_the_handle_is_closed(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    group.shutdown()
    with pytest.raises(OSError, match="handle is closed"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()
