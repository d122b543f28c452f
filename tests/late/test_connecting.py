"""Connecting with a peer that never joins. NCCL's first operation waits for it, and holds the lock
that an abort needs.
"""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import ModuleType
from typing import Any, Optional
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import ReduceOp, Store, TCPStore

from tests.late.observed import until
from tests.late.one_rank import Kernel, OneRank
from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import meeting
from torchft.futures import context_timeout
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroupNCCL,
    _first_operation,
    nccl,
)
from torchft.process_group._gloo.reaper import drain
from torchft.process_group.accelerator import AcceleratorProcessGroup
from torchft.process_group.base import BaseProcessGroup, ProcessGroup
from torchft.process_group.reconfigure import ReconfigureOptions
from torchft.utils import poll

# PyTorch's own timeout of connecting a communicator, longer than an abort may take.
CONNECTS_SEC = 2 * within(ABORT_S)


class Connecting(OneRank):
    """A non-blocking communicator: it returns at once while it connects, and its first use waits for that."""

    def __init__(self, peer: threading.Event) -> None:
        super().__init__()
        self._peer = peer
        self._lock = threading.Lock()
        self.waited = threading.Event()

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Optional[Kernel]:
        with self._lock:
            self.waited.set()
            if not self._peer.wait(CONNECTS_SEC):
                raise RuntimeError("NCCL timeout")
        return super().allreduce(tensors, opts)

    def abort(self) -> None:
        with self._lock:
            super().abort()


class Group(AcceleratorProcessGroup):
    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self.peer = threading.Event()
        self.made: list[Connecting] = []
        self.follows = True  # whether the peer joins the first operation after connecting

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        backend = Connecting(self.peer)
        if not self.follows:
            backend.hang()
        self.made.append(backend)
        self._connect(backend, torch.device("late", 0))
        return backend

    def getBackendName(self) -> str:
        return "torchft-late"


def reconfigure(group: ProcessGroup, errors: list[Exception], *others: ProcessGroup) -> None:
    opts = ReconfigureOptions()
    opts.handles = [each.get_reconfigure_handle() for each in (group, *others)]
    opts.uuid = time.monotonic_ns()
    try:
        group.reconfigure(opts)
    except Exception as e:
        errors.append(e)


def test_an_abort_ends_connecting_to_an_absent_peer(late: ModuleType) -> None:
    group = Group(timedelta(seconds=20))
    errors: list[Exception] = []
    thread = threading.Thread(target=reconfigure, args=(group, errors))
    thread.start()
    while not group.made:
        time.sleep(0.001)
    assert group.made[0].waited.wait(20)
    began = time.monotonic()
    group.abort()
    thread.join(20)
    assert time.monotonic() - began < within(ABORT_S)
    assert "aborted" in str(errors)
    group.peer.set()


def test_an_abort_ends_a_first_operation_whose_peer_does_not_follow(late: ModuleType) -> None:
    """The operation would occupy the device until the deadline, and with it everything that waits for the
    device.
    """
    group = Group(timedelta(seconds=1000))
    group.follows = False
    group.peer.set()
    errors: list[Exception] = []
    thread = threading.Thread(target=reconfigure, args=(group, errors))
    thread.start()
    until(lambda: bool(group.made) and not group.made[0].stream.query())
    group.abort()
    thread.join(20)
    assert "aborted" in str(errors)
    until(group.made[0].stream.query)
    until(lambda: group.made[0].aborts > 0)  # on another thread


def test_a_connected_rank_can_begin_at_once(late: ModuleType) -> None:
    group = Group(timedelta(seconds=20))
    group.peer.set()
    errors: list[Exception] = []
    reconfigure(group, errors)
    assert not errors and group.made[0].waited.is_set()
    tensor = torch.ones(2, device="late")
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.tolist() == [2, 2]


def test_a_wrapped_group_passes_the_options_on(late: ModuleType) -> None:
    group = Group(timedelta(seconds=20))
    group.peer.set()
    outer = ErrorSwallowingProcessGroupWrapper(FakeProcessGroupWrapper(group))
    opts = ReconfigureOptions()
    opts.handles, opts.uuid, opts.timeout = [outer.get_reconfigure_handle()], 1, timedelta(seconds=7)
    outer.reconfigure(opts)
    assert group.made[0].waited.is_set() and group._connect_timeout == timedelta(seconds=7)
    outer.configure(
        meeting(TCPStore("localhost", 0, is_master=True, wait_for_workers=False)), "replica", 0, 1
    )
    assert not group.made[1].waited.is_set() and group._connect_timeout == timedelta(seconds=20)


def test_peers_of_the_upstream_package_find_no_operation_that_they_do_not_know(
    late: ModuleType,
) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group = Group(timedelta(seconds=20))
    group.configure(meeting(store), "replica", 0, 1)
    assert not group.made[0].waited.is_set()


def test_a_slow_connection_does_not_delay_other_deadlines(late: ModuleType) -> None:
    """Its abort hangs as well, and must not block the one thread that runs all timers."""
    group = Group(timedelta(milliseconds=50))
    other = threading.Event()
    errors: list[Exception] = []
    thread = threading.Thread(target=reconfigure, args=(group, errors))
    thread.start()
    while not group.made:
        time.sleep(0.001)
    assert group.made[0].waited.wait(20)
    time.sleep(0.1)  # its deadline has passed
    with context_timeout(other.set, timedelta(milliseconds=10)):
        assert other.wait(CONNECTS_SEC / 2)
    group.peer.set()
    thread.join(20)
    assert "timed out: not all peers connected within 0.05 s" in str(errors)


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_torchfts_own_group_times_out_on_an_absent_peer(late: ModuleType, how: str) -> None:
    """`ProcessGroupNCCL` over the test device's backend, whose abort waits for the lock that connecting
    holds.
    """
    from tests.late.group import ProcessGroupLate

    timeout = timedelta(seconds=2 if how == "abort" else 0.3)
    group, other = (ProcessGroupLate(timeout) for _ in range(2))
    group.get_reconfigure_handle()  # the first one connects a group of one rank
    errors: list[Exception] = []
    thread = threading.Thread(target=reconfigure, args=(group, errors, other))
    thread.start()
    began = time.monotonic()
    if how == "abort":
        until(lambda: group._attempt is not None and bool(group._attempt._interrupts))
        began = time.monotonic()
        group.abort()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - began < within(ABORT_S if how == "abort" else 0.3)
    assert len(errors) == 1 and ("aborted" in str(errors[0]) or how == "deadline")
    assert group._pg is None


def test_nccl_is_used_once_before_peers_can_wait_for_it(
    late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first use of NCCL in a process takes most of a second."""
    from tests.late.group import ProcessGroupLate

    sizes: list[int] = []
    ended: list[bool] = []

    class Recorded(ProcessGroupLate):
        def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
            sizes.append(world_size)
            return super()._create_pg(store, rank, world_size)

    monkeypatch.setattr(nccl, "_rehearsed", set())
    monkeypatch.setattr(nccl, "poll", lambda *args: ended.append(poll(*args)))
    groups = [Recorded(timedelta(seconds=20)) for _ in range(2)]
    handles = [group.get_reconfigure_handle() for group in (*groups, *groups)]
    assert (sizes, ended) == ([1], [True])
    assert len(set(handles)) == 2 and all(group._pg is None and group.errored() is None for group in groups)


@pytest.mark.parametrize("reason", ["no device is here", "NCCL is missing"])
def test_a_group_that_cannot_use_nccl_has_a_handle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """Connecting reports what is wrong, and the other groups go on."""
    fails = MagicMock(side_effect=RuntimeError(reason))
    monkeypatch.setattr(nccl, "_rehearsed", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    if reason == "NCCL is missing":
        monkeypatch.setattr(ProcessGroupNCCL, "_create_pg", fails)
    else:
        monkeypatch.setattr(torch.cuda, "current_device", fails)
    group = ProcessGroupNCCL()
    assert group.get_reconfigure_handle() == group.get_reconfigure_handle()
    assert caplog.text.count(reason) == (reason == "NCCL is missing")


@pytest.mark.parametrize("name", nccl._NAMED_AFTER_FIRST_GROUP)
def test_the_flight_recorder_keeps_the_ranks_of_the_first_group(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """PyTorch names its pipe and files after the rank in the first NCCL group of the process."""
    monkeypatch.setenv(name, "true")
    monkeypatch.setattr(nccl, "_rehearsed", set())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(ProcessGroupNCCL, "_create_pg", made := MagicMock())
    assert ProcessGroupNCCL().get_reconfigure_handle() and not made.called


def test_memory_of_an_aborted_operation_is_not_reused(
    late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of the operation still writes after the abort. PyTorch has few streams: another user of the
    group's stream, such as FSDP2, would be given the block into which the kernel still writes garbage.
    """
    pool, backend, group = torch.Stream("late"), OneRank(), Group(timedelta(milliseconds=50))
    monkeypatch.setattr(torch, "Stream", lambda device: pool)
    monkeypatch.setattr(_first_operation, "_first", {})
    late.hold(backend.stream)
    backend.eager_connect_single_device = lambda device: None  # type: ignore[attr-defined]
    group._options = ReconfigureOptions()
    with pytest.raises(TimeoutError):
        group._connect(backend, torch.device("late", 0))
    gc.collect()
    with pool:
        mine = [torch.zeros(1, device="late") for _ in range(100)]
        pool.synchronize()  # all operations but the kernel have written
    until(lambda: backend.aborts > 0)  # on a separate thread
    late.release(backend.stream)
    backend.stream.synchronize()
    assert [one.item() for one in mine] == [0.0] * 100


@pytest.mark.slow  # 10 s; tests/integration/test_handover.py
def test_connected_ranks_reduce_while_they_connect_with_another_one(late: ModuleType) -> None:
    from tests.late.group import ProcessGroupLate

    groups = [ProcessGroupLate(timedelta(seconds=20)) for _ in range(3)]

    def options(uuid: int, count: int) -> ReconfigureOptions:
        opts = ReconfigureOptions()
        opts.uuid, opts.handles = uuid, [group.get_reconfigure_handle() for group in groups[:count]]
        return opts

    def on_device(rank: int, call: Any) -> Any:
        torch.accelerator.set_device_index(rank)
        return call(groups[rank])

    def on_ranks(ranks: range, call: Any) -> list[Any]:
        return list(pool.map(lambda rank: on_device(rank, call), ranks))

    def reduced(group: ProcessGroup) -> float:
        tensor = torch.ones(1, device="late")
        group.allreduce([tensor], ReduceOp.SUM).wait()
        return tensor.item()

    both, third, all_three = range(2), range(2, 3), range(3)
    with ThreadPoolExecutor(3) as pool:
        quorum = options(1, 2)
        on_ranks(both, lambda group: group.reconfigure(quorum))
        quorum = options(2, 3)
        attempts = on_ranks(both, lambda group: group.connect_standby(quorum))
        assert [on_ranks(both, reduced) for _ in range(20)] == [[2.0, 2.0]] * 20
        assert not any(attempt.ended for attempt in attempts), "the third one is missing"
        attempts += on_ranks(third, lambda group: group.connect_standby(quorum))
        until(lambda: all(attempt.ended for attempt in attempts))
        assert all(attempt.made for attempt in attempts)
        assert on_ranks(both, reduced) == [2.0, 2.0]
        on_ranks(all_three, lambda group: group.hand_over())
        assert on_ranks(all_three, reduced) == [3.0] * 3
        quorum = options(3, 3)
        attempts = on_ranks(both, lambda group: group.connect_standby(quorum))
        until(lambda: bool(attempts[0]._interrupts))
        began = time.monotonic()
        groups[0].abandon_standby(RuntimeError("the third one has failed"))
        assert time.monotonic() - began < within(ABORT_S) and attempts[0].ended
        assert on_ranks(all_three, reduced) == [3.0] * 3
    for group in groups:
        group.shutdown()


def connected(groups: list[Any], uuid: int, way: str = "reconfigure") -> None:
    """Connects the groups with each other, each on its own device."""
    opts = ReconfigureOptions()
    opts.uuid, opts.handles = uuid, [group.get_reconfigure_handle() for group in groups]

    def on_rank(rank: int) -> None:
        torch.accelerator.set_device_index(rank)
        if way == "reconfigure":
            groups[rank].reconfigure(opts)
        else:
            groups[rank].connect_standby(opts)
            groups[rank].hand_over()

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(on_rank, range(len(groups))))


def reduced(groups: list[Any], elements: int = 1) -> list[float]:
    def on_rank(rank: int) -> float:
        torch.accelerator.set_device_index(rank)
        tensor = torch.ones(elements, device="late")
        groups[rank].allreduce([tensor], ReduceOp.SUM).wait()
        return tensor[-1].item()

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(on_rank, range(len(groups))))


@pytest.mark.slow  # 10 s of a timeout
def test_on_a_small_device_the_former_communicator_is_freed_before_the_next_is_made(late: ModuleType) -> None:
    from tests.late.group import ProcessGroupLate

    groups = [ProcessGroupLate(timedelta(seconds=20)) for _ in range(2)]
    connected(groups, 1)
    drain(20)
    for index in range(2):
        late.room_for_communicators(index, 0, 300)
    for uuid in (2, 3):
        connected(groups, uuid)
        assert reduced(groups) == [2.0, 2.0]
    for group in groups:
        group.shutdown()


@pytest.mark.parametrize("way", ["reconfigure", "hand_over"])
def test_the_first_bucket_of_a_quorum_connects_nothing(late: ModuleType, way: str) -> None:
    """NCCL connects for an algorithm when an operation first needs it, and chooses it by the size."""
    from tests.late.group import ProcessGroupLate

    bucket = 100_000
    groups = [ProcessGroupLate(timedelta(seconds=20)) for _ in range(3)]
    connected(groups[:2], 1)
    late.algorithms()
    reduced(groups[:2], bucket)
    assert {algorithm for algorithm, _ in late.algorithms()} == {"ring"}, "the first one of the job"
    connected(groups, 2, way)  # with a group that has reduced nothing yet
    made = late.algorithms()
    assert {algorithm for algorithm, _ in made} == {"tree", "ring"}
    assert all("in first_operation" in stack and "in reduced" not in stack for _, stack in made)
    assert reduced(groups, bucket) == [3.0] * 3
    assert late.algorithms() == []
    for group in groups:
        group.shutdown()


def test_a_pair_connects_for_no_bucket(late: ModuleType) -> None:
    """It is for the parts of a heal, and its peers have no handles of their own."""
    from tests.late.group import ProcessGroupLate

    groups: list[Any] = [ProcessGroupLate(timedelta(seconds=20)) for _ in range(2)]
    connected(groups, 1)
    reduced(groups, 100_000)
    connected(groups, 2)
    late.algorithms()

    def pair(rank: int) -> Any:
        torch.accelerator.set_device_index(rank)
        return groups[rank].pair(1 - rank, "heal", timedelta(seconds=20))

    with ThreadPoolExecutor(2) as pool:
        pairs = list(pool.map(pair, range(2)))
    assert "ring" not in dict(late.algorithms())
    assert reduced(pairs) == [2.0, 2.0]
    for group in (*pairs, *groups):
        group.shutdown()
