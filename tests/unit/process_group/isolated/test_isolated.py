"""What is special about a group in another process. What every group does is in the conformance suite."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import AllgatherOptions

from tests.promises import ABORT_S, within
from tests.unit.process_group.isolated.refusing import ProcessGroupBabyRefusing, ProcessGroupBabyTelling
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroup, ProcessGroupBaby, ProcessGroupBabyGloo, ProcessGroupGloo
from torchft.process_group.isolated import channel as channel_module
from torchft.process_group.isolated import server as server_module
from torchft.process_group.isolated import standby

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def all_workers_end() -> Iterator[None]:
    yield
    if standby.servers._server is not None:
        wait_until(lambda: not workers(), "what the test has started ends")


@pytest.fixture
def alone(store: TCPStore) -> Iterator[ProcessGroupBabyGloo]:
    """A group of one rank: an operation still goes to the worker and back."""
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    yield group
    group.shutdown()


@pytest.fixture
def pair(store: TCPStore) -> Iterator[list[ProcessGroup]]:
    """A plain group and an isolated one as peers."""
    groups: list[ProcessGroup] = [ProcessGroupGloo(TIMEOUT), ProcessGroupBabyGloo(TIMEOUT)]
    connect(groups, store)
    yield groups
    for group in groups:
        group.shutdown()


def children(pid: int) -> dict[int, str]:
    """The state of each child of a process."""
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid:
            states[int(stat.parent.name)] = state
    return states


def server() -> int:
    running = standby.servers._server
    assert running is not None
    return running.pid


def workers() -> set[int]:
    return set(children(server()))


# Each costs another server, which imports PyTorch. With a standby there is more that can die or hang.
STANDBY_TOO = [pytest.param(False, marks=pytest.mark.slow), True]


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{seconds} s passed before: {what}\n{processes()}"
        time.sleep(0.01)


def processes() -> str:
    """For a failure: each worker, its age and threads, and who in this process has one."""
    told = []
    for pid in workers() if standby.servers._server is not None else ():
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(f"/proc/{pid}").st_ctime
            threads = [Path(task, "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
            told.append(f"worker {pid}, {age:.1f} s old, threads {threads}")
    for group in gc.get_objects():
        if isinstance(group, standby.Workers):
            told.append(f"{group._used=} {group._next=} {group._given=}")
    return "\n".join(told)


def ready_worker() -> int:
    """The only worker, which stands by."""
    wait_until(lambda: len(workers()) == 1, "it stands by")
    found = workers()
    assert len(found) == 1, processes()
    return found.pop()


def stop(pid: int) -> None:
    """Returns when it is stopped: until then a server may still fork a worker, and a worker answer."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")


def worker() -> int:
    """The worker of the only group: the one with threads of Gloo. That of the group before it may still be there."""
    found: list[int] = []

    def alone() -> bool:
        found.clear()
        with contextlib.suppress(FileNotFoundError):
            found.extend(pid for pid in workers() if len(os.listdir(f"/proc/{pid}/task")) > 1)
            return len(found) == 1
        return False

    wait_until(alone, "there is one worker")
    return found[0]


# Memory


def test_other_views_of_the_memory_see_the_result(pair: list[ProcessGroup]) -> None:
    """The storage of the caller stays where it is."""

    def call(rank: int) -> None:
        array = np.full(8, float(rank + 1), dtype=np.float32)
        tensor = torch.from_numpy(array)
        where = tensor.data_ptr()
        pair[rank].allreduce([tensor], ReduceOp.SUM).wait()
        assert array.tolist() == [3.0] * 8
        assert tensor.data_ptr() == where and not tensor.is_shared()

    on_ranks(2, call)


@pytest.mark.parametrize("size", [4, 1 << 16], ids=["small", "large"])
def test_memory_that_is_freed_and_allocated_again(alone: ProcessGroup, size: int) -> None:
    """Addresses come back; what is known of the old memory must not be taken for the new."""
    addresses = set()
    for i in range(20):
        tensor = torch.full((size,), float(i))
        if i % 2:
            tensor.share_memory_()
        addresses.add(tensor.data_ptr())
        gathered = torch.zeros(size)
        alone.allgather([[gathered]], [tensor], AllgatherOptions()).wait()
        assert gathered.eq(i).all()
        del tensor
    assert len(addresses) < 20


def test_shared_memory_is_lent_as_it_is(pair: list[ProcessGroup]) -> None:
    def call(rank: int) -> None:
        whole = torch.zeros(3 << 16).share_memory_()
        where = whole.data_ptr()
        part = whole[1 << 16 : 2 << 16]
        part += rank + 1
        pair[rank].allreduce([part], ReduceOp.SUM).wait()
        assert part.eq(3).all() and whole.sum() == 3 * part.numel()
        assert whole.data_ptr() == where

    on_ranks(2, call)
    sharing: Any = pair[1]._worker.channel.devices.sharing(0)  # type: ignore[attr-defined]
    assert not sharing._free and len(sharing._storages) == 1


@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1:3], lambda t: t[0].expand(2, 4)],
    ids=["transposed", "every other", "inner", "expanded"],
)
def test_gaps_in_memory_are_treated_as_gloo_does(
    store: TCPStore, alone: ProcessGroup, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    plain = ProcessGroupGloo(TIMEOUT)
    plain.configure(meeting(store), "replica", 0, 1)
    seen: list[Any] = []
    for group in (plain, alone):
        tensor = torch.arange(12.0).reshape(3, 4)
        gathered = torch.zeros(view(tensor).shape)
        try:
            group.allreduce([view(tensor)], ReduceOp.SUM).wait()
            group.allgather([[gathered]], [view(tensor)], AllgatherOptions()).wait()
            seen.append([tensor.tolist(), gathered.tolist()])
        except Exception as e:
            seen.append((type(e), str(e)))
    plain.shutdown()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("size", [3, 1 << 16], ids=["small", "large"])
def test_a_tensor_whose_memory_is_not_what_it_says(alone: ProcessGroup, size: int) -> None:
    """One with a negation pending, and one of a class that does things in its own way."""

    class Loud(torch.Tensor):
        pass

    negated = torch.complex(torch.zeros(size), torch.ones(size)).conj().imag
    loud = torch.arange(float(size)).as_subclass(Loud)
    assert negated.is_neg()
    for tensor in (negated, loud):
        gathered = torch.zeros(size)
        alone.allgather([[gathered]], [tensor], AllgatherOptions()).wait()
        assert torch.equal(gathered, tensor.as_subclass(torch.Tensor))
    alone.broadcast_one(loud, 0).wait()
    alone.allreduce([loud], ReduceOp.SUM).wait()
    assert type(loud) is Loud and loud[2] == 2


def test_a_tensor_that_requires_grad(alone: ProcessGroup) -> None:
    weight = torch.ones(4, requires_grad=True)
    alone.allreduce([weight], ReduceOp.SUM).wait()
    assert weight.requires_grad and weight.is_leaf


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(2, device="meta"), "torchft-baby-gloo: allreduce: a tensor on meta is not supported"),
        (torch.eye(2).to_sparse(), "torchft-baby-gloo: allreduce: "),
    ],
    ids=["meta", "sparse"],
)
def test_what_cannot_be_lent_is_refused_by_name(alone: ProcessGroup, tensor: torch.Tensor, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        alone.allreduce([tensor], ReduceOp.SUM)
    assert alone.errored() is None


@pytest.mark.parametrize("given", [[3], [None], [[torch.ones(1)]]], ids=["number", "nothing", "list"])
def test_what_is_no_tensor_is_named(alone: ProcessGroup, given: Any) -> None:
    with pytest.raises(TypeError, match=r"torchft-baby-gloo: allreduce: .* is no tensor"):
        alone.allreduce(given, ReduceOp.SUM)
    assert alone.errored() is None


# Operations


def test_more_operations_in_flight_than_a_socket_holds(alone: ProcessGroup) -> None:
    tensors = [torch.full((4,), float(i)) for i in range(3000)]
    works = [alone.allreduce([tensor], ReduceOp.SUM) for tensor in tensors]
    assert 0 < alone.num_active_work() <= 3000  # type: ignore[attr-defined]
    works[-1].wait()
    for work in works:
        work.wait()
    assert alone.num_active_work() == 0  # type: ignore[attr-defined]
    assert [tensor[0].item() for tensor in tensors] == list(range(3000))


def test_an_operation_with_very_many_tensors(alone: ProcessGroup) -> None:
    """Its request does not fit into the socket."""
    tensors = [torch.full((3,), float(i)) for i in range(1500)]
    alone.allreduce_coalesced(tensors, ReduceOp.SUM).wait()
    assert [tensor[2].item() for tensor in tensors] == list(range(1500))


def test_futures_are_completed_with_their_own_tensors(alone: ProcessGroup) -> None:
    seen: dict[int, Any] = {}
    done = threading.Semaphore(0)
    tensors = [torch.full((2,), float(i)) for i in range(30)]
    for i, tensor in enumerate(tensors):
        future = alone.allreduce([tensor], ReduceOp.SUM).get_future()

        def callback(future: Any, i: int = i) -> None:
            seen[i] = future.value()
            done.release()

        future.add_done_callback(callback)
    for _ in tensors:
        assert done.acquire(timeout=TIMEOUT.total_seconds())
    assert all(seen[i][0] is tensor or seen[i][0].data_ptr() == tensor.data_ptr() for i, tensor in enumerate(tensors))


def test_two_threads_wait_and_a_third_for_a_future(pair: list[ProcessGroup]) -> None:
    """Whoever reads the answers passes on what belongs to others."""
    plain, isolated = pair
    tensors = [torch.zeros(2) for _ in range(3)]
    works = [isolated.recv([tensor], 0, tag) for tag, tensor in enumerate(tensors)]
    future = works[2].get_future()
    waits: Sequence[Callable[[], Any]] = [lambda: works[0].wait(), lambda: works[1].wait(), lambda: future.wait()]

    def send() -> None:
        for tag in (2, 1, 0):
            plain.send([torch.full((2,), float(tag))], 1, tag).wait()

    results = in_threads([*waits, send])
    assert not [result for result in results if isinstance(result, Exception)]
    assert [tensor[0].item() for tensor in tensors] == [0, 1, 2]


def test_threads_use_one_group(pair: list[ProcessGroup]) -> None:
    """Each pair of threads has its tag, and none gets another's message."""

    def talk(rank: int, tag: int) -> None:
        for i in range(20):
            tensor = torch.full((4,), 100.0 * tag + i)
            if rank == i % 2:
                pair[rank].send([tensor], 1 - rank, tag).wait()
            else:
                got = torch.zeros(4)
                pair[rank].recv([got], 1 - rank, tag).wait()
                assert torch.equal(got, tensor)

    calls = [lambda rank=rank, tag=tag: talk(rank, tag) for rank in (0, 1) for tag in (0, 1)]
    assert in_threads(calls) == [None] * 4


def test_a_wait_that_times_out_leaves_the_operation_alone(pair: list[ProcessGroup]) -> None:
    tensor = torch.zeros(1)
    work = pair[1].recv([tensor], 0, 7)
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=50))
    assert not work.is_completed() and not work.is_success()
    pair[0].send([torch.ones(1)], 1, 7).wait()
    work.wait()
    assert work.is_success() and tensor.item() == 1


# Death


def pending(group: ProcessGroup) -> Any:
    return group.recv([torch.zeros(1)], 0, 99)


def assert_all_end(group: ProcessGroup, end: Callable[[], None], says: str) -> None:
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
        time.sleep(0.05)  # until they wait; sooner is allowed, too
        now = time.monotonic()
        end()
        return now

    calls = [lambda: wait(works[0].wait), lambda: wait(works[1].wait), lambda: wait(future.wait)]
    *errors, at = in_threads([*calls, kill])
    for error in errors:
        assert isinstance(error, RuntimeError) and says in str(error)
    print(f"{says}: all waits had ended after {1000 * (max(ended) - at):.1f} ms")
    assert max(ended) - at < within(ABORT_S)


def test_a_killed_worker_ends_all_waits(pair: list[ProcessGroup], store: TCPStore) -> None:
    isolated = pair[1]
    pid = worker()
    assert_all_end(isolated, lambda: os.kill(pid, signal.SIGKILL), "the worker process died")
    assert isinstance(isolated.errored(), RuntimeError)
    with pytest.raises(RuntimeError, match="the worker process died"):
        pending(isolated)
    wait_until(lambda: pid not in workers(), "it is reaped")
    connect(pair, store)
    on_ranks(2, lambda rank: pair[rank].allreduce([torch.ones(1)], ReduceOp.SUM).wait())


def test_an_abort_ends_all_waits(pair: list[ProcessGroup]) -> None:
    assert_all_end(pair[1], pair[1].abort, "was aborted")
    assert isinstance(pair[1].errored(), RuntimeError)


def test_a_worker_that_is_slow_to_die_keeps_what_it_shares(
    alone: ProcessGroupBabyGloo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may write there until it has ended."""
    alone.allreduce([torch.ones(4)], ReduceOp.SUM).wait()
    assert alone._worker is not None
    closed = threading.Event()
    monkeypatch.setattr(alone._worker.channel.devices, "close", closed.set)
    pid, killer = worker(), server()
    stop(killer)
    try:
        alone.abort()
        assert not closed.is_set() and pid in children(killer)
    finally:
        os.kill(killer, signal.SIGCONT)
    assert closed.wait(60)
    assert pid not in workers()


def test_a_stopped_worker_is_given_up(pair: list[ProcessGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither answers nor dies."""
    monkeypatch.setattr(channel_module, "_PING_EVERY_SEC", 0.05)
    monkeypatch.setattr(channel_module, "_UNRESPONSIVE_SEC", 0.3)
    isolated = pair[1]
    isolated.set_timeout(timedelta(milliseconds=100))
    pid = worker()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="does not respond"):
        pending(isolated).wait()
    wait_until(lambda: pid not in workers(), "it is ended")


def test_reconfigurations_leave_nothing_behind(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)

    def configure() -> None:
        group.configure(meeting(store), "replica", 0, 1)
        group.allreduce([torch.ones(4)], ReduceOp.SUM).wait()

    def leftovers() -> tuple[int, int, int, int]:
        # The standby of the latest is still to come, and the one before last to go.
        wait_until(lambda: len(children(server())) == 2 and "Z" not in children(server()).values(), "two workers")
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
    for i in range(100):
        if i % 10 == 0:
            # In the middle of an operation
            group.allreduce([torch.ones(1 << 18)], ReduceOp.SUM)
        configure()
    # What other tests left in this process may end meanwhile.
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
        os.write(1, f"{e}\n".encode())  # in one piece
    time.sleep(20)
    os._exit(0)
os.write(1, f"{standby.servers._server.pid}\n".encode())
time.sleep(60)
"""


def test_a_killed_trainer_takes_everything_along() -> None:
    """Also while a child of its own lives on, with all that it inherited."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as trainer:
        assert trainer.stdout is not None
        lines = sorted(trainer.stdout.readline() for _ in range(2))
        try:
            assert "a forked process cannot use its parent's group" in lines[1]
            pid = int(lines[0])
            wait_until(lambda: len(children(pid)) == 2, "a worker and a standby")
            everything = [pid, *children(pid)]
            trainer.kill()
            wait_until(lambda: not any(Path(f"/proc/{p}").exists() for p in everything), "all are gone")
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)


# Workers


def test_the_worker_that_stands_by_becomes_the_next(store: TCPStore) -> None:
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


def test_a_standby_that_died_is_replaced(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    ready = ready_worker()
    os.kill(ready, signal.SIGKILL)
    wait_until(lambda: ready not in workers(), "it is gone")
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


def test_a_server_that_died_is_replaced(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    old = server()
    os.kill(old, signal.SIGKILL)
    # The kernel ends the worker with its server.
    wait_until(lambda: group.errored() is not None, "the group notices")
    with pytest.raises(RuntimeError, match="the worker process died"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    group.configure(meeting(store), "replica", 0, 1)
    assert server() != old
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


def test_a_standby_whose_death_nobody_has_noticed_is_replaced(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies with its server, a moment before or after somebody looks."""
    group = ProcessGroupBabyGloo(TIMEOUT)
    ready = ready_worker()
    monkeypatch.setattr(channel_module.Channel, "lost", lambda channel: channel.broken is not None)
    os.kill(ready, signal.SIGKILL)
    wait_until(lambda: ready not in workers(), "it is gone")
    group.configure(meeting(store), "replica", 0, 1)
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


@pytest.mark.parametrize("standby_too", STANDBY_TOO)
def test_a_server_that_dies_while_it_is_asked_is_replaced(
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
    start = channel_module.Channel.start

    def tell(channel: Any, *args: Any) -> Any:
        op = start(channel, *args)
        asked.set()
        return op

    monkeypatch.setattr(channel_module.Channel, "start", tell)

    def kill() -> None:
        assert asked.wait(20)
        os.kill(old, signal.SIGKILL)

    results = in_threads([lambda: group.configure(meeting(store), "replica", 0, 1), kill])
    assert results == [None, None]
    assert server() != old
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


def test_a_server_that_has_ended_and_counts_as_alive_is_replaced(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed counts as alive until the kernel is through with it."""
    group = ProcessGroupBabyGloo(TIMEOUT, standby=False)
    old = standby.servers.get()
    os.kill(old.pid, signal.SIGKILL)
    os.waitid(os.P_PID, old.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(old, "alive", lambda: True)
    group.configure(meeting(store), "replica", 0, 1)
    assert server() != old.pid
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()


@pytest.mark.parametrize("standby_too", STANDBY_TOO)
def test_a_server_that_hangs_is_given_up(store: TCPStore, monkeypatch: pytest.MonkeyPatch, standby_too: bool) -> None:
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
        # As at the end of the process: groups that a failed test has left do not count
        standby.servers.close()
        # On a busy machine whoever kills it does not wait until it can be reaped
        wait_until(lambda: children(os.getpid()).get(old, "Z") == "Z", "it is killed")
    finally:
        if children(os.getpid()).get(old) == "T":  # else the next tests would wait for it
            os.kill(old, signal.SIGKILL)


def test_workers_that_die_again_and_again_are_given_up(store: TCPStore) -> None:
    # Not above: workers import this module for other tests.
    from tests.unit.process_group.isolated.dying import ProcessGroupBabyDying

    group = ProcessGroupBabyDying(TIMEOUT)
    with pytest.raises(RuntimeError, match="dying: the worker process died"):
        group.configure(meeting(store), "replica", 0, 1)
    with pytest.raises(RuntimeError, match="dying: the worker process died"):
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
    """The garbage collector runs wherever it likes, and there ends the groups that nobody refers to."""
    group: Any = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    channel, shared = group._worker.channel, standby.servers._server
    assert shared is not None
    group.itself = group

    def collect() -> None:
        with standby.servers._lock, shared._lock, channel._lock, channel.wire._send_lock:
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    del group
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert channel.broken is not None
    wait_until(lambda: not workers(), "its workers end")


def test_a_standby_is_small(alone: ProcessGroup) -> None:
    wait_until(lambda: len(workers()) == 2, "one works and one stands by")
    for pid in workers():
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private"))
        print(f"private memory: {private / 1000:.0f} MB")
        assert private < 100_000, f"{private} kB"


def test_the_worker_has_neither_the_native_library_nor_the_users_script(store: TCPStore) -> None:
    group = ProcessGroupBabyTelling(TIMEOUT)
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


def test_a_worker_that_cannot_be_forked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "fork", fork)
    # The server as it is, but for the process that it runs in.
    forking = object.__new__(server_module._Server)
    forking._error, forking._workers = "", {}
    channel = channel_module.Channel("a group", lambda *_: None, lambda: None)  # type: ignore[arg-type,return-value]
    (requests, answers), (end, ended) = channel.wire.theirs, os.pipe()
    with open(end, "rb", buffering=0) as reading:
        forking._spawn({"spawn": 1}, requests.detach(), answers, ended)
        assert reading.read() == b"" and not forking._workers
    assert channel.lost()
    assert "the worker could not be forked: [Errno 12] Cannot allocate memory" in str(channel.broken)


def test_a_class_that_the_worker_cannot_find(store: TCPStore) -> None:
    class Local(ProcessGroupBabyGloo):
        pass

    group = Local(TIMEOUT)
    with pytest.raises(RuntimeError, match="<locals>"):
        group.configure(meeting(store), "replica", 0, 1)
    group.shutdown()


def test_the_last_words_of_a_worker_are_read_first(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that cannot be sent any more shows the end of the worker sooner than its answers do."""
    monkeypatch.setattr(channel_module.Channel, "lost", lambda channel: channel.broken is not None)

    class Local(ProcessGroupBabyGloo):
        pass

    group = Local(TIMEOUT)
    channel: Any = group._workers._next.channel  # type: ignore[union-attr]
    wait_until(lambda: select.select([channel.wire._answers], [], [], 0)[0], "the worker has said why")
    wait_until(lambda: not workers(), "and has ended")
    with pytest.raises(RuntimeError, match="<locals>"):
        group.configure(meeting(store), "replica", 0, 1)
    group.shutdown()


def test_a_class_in_the_users_script() -> None:
    group = type("Scripted", (ProcessGroupBabyGloo,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="Scripted is defined in __main__"):
        group()


def test_peers_that_do_not_come_are_given_up(store: TCPStore) -> None:
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


def test_the_end_of_the_process_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes first there, and then its users; a thread that starts so late may not come to its end."""
    servers = standby._Servers()
    monkeypatch.setattr(standby, "_TIMEOUT_MANAGER", None)
    servers.acquire()
    servers.close()
    servers.release()
    assert servers._server is None and servers._end is None


# The state


def test_calls_in_any_order(store: TCPStore) -> None:
    group = ProcessGroupBabyGloo(TIMEOUT)
    assert (group.size(), group.rank(), group.num_active_work(), group.errored()) == (-1, 0, 0, None)
    group.abort()
    assert group.errored() is None
    with pytest.raises(AssertionError, match="process group not initialized"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)
    for _ in range(2):
        group.configure(meeting(store), "replica", 0, 1)
        group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    group.shutdown()
    with pytest.raises(OSError, match="handle is closed"):
        group.barrier()
    group.configure(meeting(store), "replica", 0, 1)
    group.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        group.barrier()
    group.shutdown()


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 1), (0, 0)])
def test_a_bad_rank_is_named(alone: ProcessGroup, store: TCPStore, rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} must be between 0 and"):
        alone.configure(meeting(store), "replica", rank, world_size)


@pytest.mark.parametrize("timeout", [0, -1.0, timedelta(0), float("inf"), "soon"])
def test_a_bad_timeout_is_named(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*a timedelta above zero is needed, or seconds"):
        ProcessGroupBabyGloo(timeout)


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_ISOLATED_STANDBY", "yes")
    with pytest.raises(ValueError, match="TORCHFT_ISOLATED_STANDBY='yes': 0 or 1 is needed"):
        ProcessGroupBabyGloo()


def test_the_base_runs_nothing() -> None:
    with pytest.raises(NotImplementedError, match=r"ProcessGroupBaby\._create_pg"):
        ProcessGroupBaby._create_pg(None, 0, 1)  # type: ignore[arg-type]
