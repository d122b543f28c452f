"""A step on a device ends only after the device has finished, for each kind of process group."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from tests.late.group import ProcessGroupLate
from tests.late.one_rank import Group, OneRank
from tests.promises import ABORT_S, within
from tests.unit.manager.conftest import Fixture, fixture, quorum
from torchft._agreement import AVERAGES, announced
from torchft._manager.edge import Peers
from torchft._torchft import MemberFailure
from torchft.manager import Manager
from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroup
from torchft.utils import DeviceEvent
from torchft.work import _DummyWork

__all__ = ["fixture"]


class Torchfts(Group):
    """A process group of torchft, like the one for NCCL."""

    def get_reconfigure_handle(self) -> str:
        return "late"

    def reconfigure(self, opts: object) -> Any:
        self._reset()
        self._pg = self.backend = OneRank()
        return _DummyWork(None)


class Custom(ProcessGroup):
    """A user's process group, which returns its backend's works and never reports an error."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.backend = OneRank()

    def get_reconfigure_handle(self) -> str:
        return "late"

    def reconfigure(self, opts: object) -> Any:
        return _DummyWork(None)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        return self.backend.allreduce(tensors, opts)

    def abort(self) -> None:
        self.backend.abort()


KINDS = ["torchft", "native", "custom"]


# Of the Manager, whose constructor connects to a store: a busy machine may take 0.2 s for that.
DEADLINE = timedelta(seconds=2)


@contextmanager
def started(
    fixture: Fixture,
    kind: str = "torchft",
    reconfigure_handles: Sequence[str] = ("late", "late of another"),
    max_world_size: int = 2,
    **given: Any,
) -> Iterator[tuple[Manager, OneRank]]:
    pg: Any = {"torchft": Torchfts, "native": OneRank, "custom": Custom}[kind]()
    fixture.client._quorum.return_value = quorum(
        reconfigure_handles=[*reconfigure_handles], max_world_size=max_world_size, max_replica_rank=0
    )
    manager = fixture.manager(pg=pg, **given)
    manager.start_quorum()
    manager.wait_quorum()
    backend = pg if kind == "native" else pg.backend
    yield manager, backend
    backend.peer_comes()


class Vote:
    """Runs `should_commit` on a separate thread."""

    def __init__(self, manager: Manager) -> None:
        self._answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(manager.should_commit()))
        self.began = time.monotonic()
        self._thread.start()

    def answer(self) -> bool:
        self._thread.join(20)
        return self._answers[0]


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n, device="late")


def failure() -> MemberFailure:
    return MemberFailure(1, "group_0:uuid", "its connection broke")


@pytest.mark.parametrize("through_future", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_vote_comes_after_the_device(
    fixture: Fixture, late: ModuleType, kind: str, through_future: bool
) -> None:
    with started(fixture, kind) as (manager, backend):
        backend.hang()
        tensor = ones()
        work = manager.allreduce(tensor)
        assert work.get_future().done() if through_future else work.wait()
        vote = Vote(manager)
        time.sleep(0.05)
        assert fixture.votes() == []
        backend.peer_comes()
        assert vote.answer()
        assert tensor.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", ["torchft", "native"])  # not a user's group, whose backend is unknown
def test_a_failure_in_the_last_collective_that_the_backend_handles_costs_the_step(
    fixture: Fixture, late: ModuleType, kind: str
) -> None:
    with started(fixture, kind) as (manager, backend):
        backend.hang()
        manager.allreduce(ones()).wait()
        vote = Vote(manager)
        time.sleep(0.02)
        backend.fail()
        assert not vote.answer() and fixture.votes() == [False]
        assert "COMM_ERROR" in str(manager.errored())


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_does_not_finish_fails_the_step_at_the_deadline(
    fixture: Fixture, late: ModuleType, kind: str
) -> None:
    with started(fixture, kind, timeout=DEADLINE) as (manager, backend):
        backend.hang()
        manager.allreduce(ones()).wait()
        vote = Vote(manager)
        assert not vote.answer()
        assert time.monotonic() - vote.began < within(DEADLINE.total_seconds() + ABORT_S)
        assert backend.aborts == 1


def test_a_poll_asks_for_one_event_only(
    fixture: Fixture, late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one first, and none twice that was reached."""
    asked: list[DeviceEvent] = []
    reached = DeviceEvent.reached

    def ask(mark: DeviceEvent) -> bool:
        asked.append(mark)
        return reached(mark)

    with started(fixture) as (manager, backend):
        works = [manager.allreduce(ones()) for _ in range(3)]
        for work in works:
            work.wait()
        torch.accelerator.synchronize()
        backend.hang()
        works.append(manager.allreduce(ones()))
        works[-1].wait()
        marks = [
            flight
            for flight in manager._current.collectives._flights.values()
            if isinstance(flight, DeviceEvent)
        ]
        monkeypatch.setattr(DeviceEvent, "reached", ask)
        vote = Vote(manager)
        deadline = time.monotonic() + 20
        while len(asked) < 5:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert set(asked) == {marks[-1]}
        asked.clear()
        backend.peer_comes()
        assert vote.answer()
        assert [asked.count(mark) for mark in marks[:-1]] == [1, 1, 1]


@pytest.mark.parametrize("while_voting", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reported_failure_ends_queued_collectives(
    fixture: Fixture, late: ModuleType, kind: str, while_voting: bool
) -> None:
    """This happens in the last collective: all works have been waited for, and the device waits for the
    peer.
    """
    with started(fixture, kind) as (manager, backend):
        backend.hang()
        manager.allreduce(ones()).wait()
        assert manager._failures.progress()[0], "it waits for its peers"
        vote = Vote(manager) if while_voting else None
        began = time.monotonic()
        manager._failures.member_failed(failure())
        assert backend.aborts == 1
        assert not (vote or Vote(manager)).answer()
        assert time.monotonic() - began < within(ABORT_S)
        assert "group_0:uuid of quorum 1 failed" in str(manager.errored())


MARKED = '{"id": "a", "store": "s", "torchft_averages": "1"}'
UNMARKED = '{"id": "b", "store": "s"}'


@pytest.mark.parametrize(
    ("handles", "participants", "op"),
    [
        ([MARKED, MARKED], 2, ReduceOp.AVG),
        ([MARKED, UNMARKED], 2, ReduceOp.SUM),  # upstream's group divides a sum
        ([MARKED, MARKED], 1, ReduceOp.SUM),  # the other group contributes zeros
    ],
)
def test_the_backend_averages_if_all_members_take_part_and_can(
    fixture: Fixture, late: ModuleType, handles: list[str], participants: int, op: ReduceOp
) -> None:
    with started(fixture, reconfigure_handles=handles, max_world_size=participants) as (manager, backend):
        tensor = ones()
        manager.allreduce(tensor).wait()
        manager.allreduce(ones(), reduce_op=ReduceOp.SUM).wait()
        assert tensor.tolist() == [2 / participants] * 4 if op == ReduceOp.SUM else [1] * 4
        assert backend.ops == [op, ReduceOp.SUM]
        assert manager.should_commit()


@pytest.mark.parametrize(("group", "text"), [(ProcessGroupLate, "1"), (Torchfts, "")])
def test_a_group_whose_backend_averages_announces_it(
    late: ModuleType, group: Callable[[], Any], text: str
) -> None:
    wrapped = ErrorSwallowingProcessGroupWrapper(group())
    assert [announced(Peers(pg).handle(), AVERAGES) for pg in (group(), wrapped)] == [text] * 2


def test_a_failure_after_the_device_has_finished_costs_nothing(fixture: Fixture, late: ModuleType) -> None:
    with started(fixture) as (manager, backend):
        manager.allreduce(ones()).wait()
        torch.accelerator.synchronize()
        manager._failures.member_failed(failure())
        assert backend.aborts == 0
        assert manager.should_commit()


@pytest.mark.parametrize("through_future", [False, True])
def test_results_are_not_held_until_the_vote(
    fixture: Fixture, late: ModuleType, through_future: bool
) -> None:
    with started(fixture) as (manager, _):
        tensor = ones()
        kept = weakref.ref(tensor)
        work = manager.allreduce(tensor)
        if through_future:
            work.get_future().wait()
        else:
            work.wait()
        del tensor, work
        assert kept() is None
        assert manager.should_commit()


@pytest.mark.parametrize("through_future", [False, True])
def test_a_second_waiter_on_another_stream_reads_the_average(
    fixture: Fixture, late: ModuleType, through_future: bool
) -> None:
    first, second = torch.Stream("late"), torch.Stream("late")
    with started(fixture) as (manager, _):
        tensor = ones()
        work = manager.allreduce(tensor)
        with late.held(first):
            with first:
                work.wait()
            with second:
                work.get_future().wait() if through_future else work.wait()
                read = tensor + 0
                done = second.record_event()
            deadline = time.monotonic() + 0.2  # time in which a wrong implementation would read too early
            while not done.query() and time.monotonic() < deadline:
                time.sleep(0.001)
        done.synchronize()
        assert read.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_wait_without_a_timeout_leaves_the_host_free(
    fixture: Fixture, late: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's NCCL blocks the host if a wait has a timeout, so that FSDP could not overlap anything."""
    with started(fixture, kind) as (manager, backend):
        backend.hang()
        waited = threading.Event()
        work = manager.allreduce(ones())
        threading.Thread(target=lambda: (work.wait(), waited.set())).start()
        assert waited.wait(5)
        backend.peer_comes()
        assert manager.should_commit()


@pytest.mark.parametrize("kind", KINDS)
def test_a_future_uses_no_device_but_that_of_its_tensors(
    fixture: Fixture, late: ModuleType, kind: str
) -> None:
    """Each device that a future names gets a stream, and on CUDA also a context of hundreds of MB."""
    with started(fixture, kind) as (manager, _):
        for _ in range(32):
            torch.Stream("late")  # fills the pool of this device's streams
        before = late.stats()["streams"]
        manager.allreduce(ones()).get_future().then(lambda done: done.value()).wait()
        assert late.stats()["streams"] == before


@pytest.mark.parametrize(
    ("kind", "make", "what"),
    [
        # PyTorch's own groups pretend to reduce a tensor on the meta device, and call no backend.
        *((kind, lambda: torch.ones(2, device="meta"), "on the meta device") for kind in KINDS),
        ("torchft", lambda: torch.eye(2).to_sparse(), "of layout torch.sparse_coo"),
    ],
    ids=[*(f"meta {kind}" for kind in KINDS), "sparse"],
)
def test_a_tensor_that_cannot_be_reduced_costs_the_step_without_delay(
    fixture: Fixture, late: ModuleType, kind: str, make: Callable[[], torch.Tensor], what: str
) -> None:
    with started(fixture, kind) as (manager, backend):
        manager.allreduce(make()).wait()
        assert backend.aborts == 1, "the peers wait for what is not reduced here"
        assert not manager.should_commit()
        assert "allreduce of a tensor " + what in str(manager.errored())


def test_a_captured_allreduce_is_refused(
    fixture: Fixture, late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.get_device_module(), "is_current_stream_capturing", lambda: True, raising=False)
    with (
        started(fixture) as (manager, _),
        pytest.raises(RuntimeError, match=r"Manager.allreduce cannot be captured"),
    ):
        manager.allreduce(ones())


def test_a_second_waiter_reads_the_average(fixture: Fixture, late: ModuleType) -> None:
    """Both threads wait for the collective. The division is queued on the stream of the first one."""
    first, second = torch.Stream("late"), torch.Stream("late")
    waits, may_end = threading.Event(), threading.Event()
    read: list[torch.Tensor] = []
    with started(fixture) as (manager, _):
        tensor = ones()
        work = manager.allreduce(tensor)
        wait = work._work.wait

        def slow(*given: Any) -> bool:
            result = wait(*given)
            if threading.current_thread() is other:
                waits.set()
                assert may_end.wait(20)
            return result

        def wait_on_second() -> None:
            with second:
                work.wait()
                read.append(tensor + 0)

        other = threading.Thread(target=wait_on_second)
        work._work.wait = slow
        with late.held(first):
            other.start()
            assert waits.wait(20)
            with first:
                work.wait()
            may_end.set()
            other.join(20)
            done = second.record_event()
            deadline = time.monotonic() + 0.2  # time in which a wrong implementation would read too early
            while not done.query() and time.monotonic() < deadline:
                time.sleep(0.001)
        done.synchronize()
        assert read[0].tolist() == [1, 1, 1, 1]


def test_a_drain_waits_for_the_device(fixture: Fixture, late: ModuleType) -> None:
    with started(fixture) as (manager, backend):
        backend.hang()
        work: Any = manager.allreduce(ones())
        assert not work.drain(timedelta(milliseconds=50))
        backend.peer_comes()
        assert work.drain(timedelta(seconds=20)) and backend.stream.query()
