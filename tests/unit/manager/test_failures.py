"""The effect on a step of a peer's failure that the lighthouse reports."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Optional

import pytest
import torch
from torch.distributed import Work

from torchft._manager.step import failures
from torchft._torchft import MemberFailure, QuorumResult
from torchft.futures import future_wait
from torchft.manager import Manager
from torchft.process_group import ProcessGroupDummy
from torchft.utils import DeviceEvent

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture


class PendingWork(Work):
    """An operation that ends when the test completes its future, or when its group is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        future_wait(self.future, timedelta(seconds=30) if timeout is None else timeout)
        return True

    def is_completed(self) -> bool:
        return self.future.done()

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


class PendingGroup(ProcessGroupDummy):
    """A group whose abort ends operations in flight before it returns, on the calling thread."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.works: list[PendingWork] = []
        self.aborts = 0
        self.meanwhile: Callable[[], None] = lambda: None
        self.connecting: Callable[[], None] = lambda: None
        self.on_abort: Callable[[], None] = lambda: None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self.connecting()
        super().configure(*args, **kwargs)

    def allreduce(self, tensors: Any, opts: Any) -> Work:
        self.meanwhile()
        self.works.append(PendingWork())
        return self.works[-1]

    def abort(self) -> None:
        self.aborts += 1
        self.on_abort()
        for work in self.works:
            if not work.future.done():
                work.future.set_exception(RuntimeError("aborted"))


def started(fixture: Fixture) -> tuple[Manager, PendingGroup]:
    group = PendingGroup()
    manager = fixture.manager(pg=group)
    manager.start_quorum()
    manager.wait_quorum()
    return manager, group


def failure(quorum_id: int = 1, step: int = 0) -> MemberFailure:
    return MemberFailure(quorum_id, "group_0:uuid", "its connection broke", step)


def test_a_failure_ends_operations_in_flight(fixture: Fixture) -> None:
    manager, group = started(fixture)
    work = manager.allreduce(torch.ones(1))
    manager._failures.member_failed(failure())
    assert not work.wait() and group.aborts == 1
    assert not manager.should_commit()
    assert "group_0:uuid of quorum 1 failed" in str(manager.errored())


def test_a_failure_after_its_part_of_the_step_costs_no_step(fixture: Fixture) -> None:
    """While a quorum stands, a member may be one step ahead: the others' collectives end a moment after its
    own.
    """
    manager, group = started(fixture)
    work = manager.allreduce(torch.ones(1))
    notice = threading.Thread(target=manager._failures.member_failed, args=[failure(step=1)])
    notice.start()
    more = manager.allreduce(torch.ones(1))  # no collective of this step is refused
    for begun in group.works:
        begun.future.set_result(None)
    assert work.wait() and more.wait() and manager.should_commit()
    notice.join()
    assert group.aborts == 0 and manager.errored() is None


def test_a_step_that_does_not_end_after_a_failure_is_aborted(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_REMAINDER_SEC", 0.0)
    manager, group = started(fixture)
    work = manager.allreduce(torch.ones(1))
    manager._failures.member_failed(failure(step=1))
    assert not work.wait() and group.aborts == 1
    assert not manager.should_commit()


def test_a_member_that_leaves_a_later_step_of_a_quorum_ends_that_step(
    fixture: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    """The plan of a quorum that stands has the step in which it began."""
    manager, group = started(fixture)
    assert manager.should_commit()
    manager.start_quorum()
    manager.wait_quorum()
    assert manager.current_step() == 1 and group.works == []
    manager._failures.member_failed(failure(step=1))
    for _ in range(3):
        manager.allreduce(torch.ones(1)).wait()
    assert group.works == [] and not manager.should_commit()
    assert "group_0:uuid of quorum 1 failed" in str(manager.errored())
    logged = [r for r in caplog.records if r.name == "torchft.manager" and "group_0:uuid" in r.getMessage()]
    assert [r.exc_info for r in logged] == [None], "one line, whatever the number of reductions"


def test_a_late_failure_of_an_earlier_step_does_not_fail_the_next_one(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    """For example, a loss is reduced after the commit without a wait, and the reduction fails in the next
    quorum.
    """
    manager, group = started(fixture)
    assert manager.should_commit()
    loss = manager.allreduce(torch.ones(1))
    future = loss.get_future()
    fixture.client._quorum.return_value = make_quorum(quorum_id=2, max_step=1)
    manager.start_quorum()
    manager.wait_quorum()
    group.works[0].future.set_exception(RuntimeError("Connection closed by peer"))
    future.wait()
    assert not loss.wait()
    assert manager.errored() is None and group.aborts == 0
    gradients = manager.allreduce(torch.ones(1))
    group.works[1].future.set_result(None)
    assert gradients.wait() and manager.should_commit()


def test_a_late_device_fails_only_its_own_step(fixture: Fixture) -> None:
    manager, group = started(fixture)
    earlier = manager._current.collectives
    assert manager.should_commit()
    manager.start_quorum()
    manager.wait_quorum()

    class Late(DeviceEvent):
        def __init__(self) -> None:
            pass

        def reached(self) -> bool:
            return False

    earlier._flights[0] = Late()
    earlier.end(timedelta(0))
    assert manager.errored() is None and group.aborts == 0
    assert manager.should_commit()


def test_a_failure_reported_while_the_first_collective_begins(fixture: Fixture) -> None:
    """The thread that receives the report finds no work in flight, because the collective has only begun."""
    manager, group = started(fixture)
    group.meanwhile = lambda: manager._failures.member_failed(failure())
    manager.allreduce(torch.ones(1)).wait()
    assert group.aborts == 1
    assert not manager.should_commit()


def test_a_failure_in_another_quorum_does_nothing(fixture: Fixture) -> None:
    manager, group = started(fixture)
    manager._failures.member_failed(failure(quorum_id=0))
    work = manager.allreduce(torch.ones(1))
    manager._failures.member_failed(failure(quorum_id=0))
    group.works[0].future.set_result(None)
    assert work.wait() and manager.should_commit() and group.aborts == 0


def test_a_failure_in_a_quorum_that_this_rank_does_not_have_yet(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    """The lighthouse may report a failure in the next quorum before this rank gets that quorum."""
    manager, group = started(fixture)
    work = manager.allreduce(torch.ones(1))
    manager._failures.member_failed(failure(quorum_id=2))
    manager._failures.member_failed(failure(quorum_id=0))  # a late report must not replace the first one
    group.works[0].future.set_result(None)
    assert work.wait() and manager.should_commit() and group.aborts == 0
    fixture.client._quorum.return_value = make_quorum(quorum_id=2)
    manager.start_quorum()
    manager.allreduce(torch.ones(1)).wait()
    assert len(group.works) == 1, "nothing is begun with a failed peer"
    assert not manager.should_commit()
    assert "group_0:uuid of quorum 2 failed" in str(manager.errored())
    fixture.client._quorum.return_value = make_quorum(quorum_id=3)
    manager.start_quorum()
    work = manager.allreduce(torch.ones(1))
    group.works[-1].future.set_result(None)
    assert work.wait() and manager.should_commit()


def test_a_failure_while_the_group_connects(fixture: Fixture) -> None:
    """Without the report, connecting with a failed peer would take until the timeout."""
    group = PendingGroup()
    aborted = threading.Event()

    def connect() -> None:
        threading.Thread(target=manager._failures.member_failed, args=[failure()], daemon=True).start()
        ended.append(aborted.wait(10))
        raise RuntimeError("aborted")

    ended: list[bool] = []  # an AssertionError in the callback would count as an error of the group
    manager = fixture.manager(pg=group)
    group.connecting, group.on_abort = connect, aborted.set
    manager.start_quorum()
    manager.wait_quorum()
    manager.allreduce(torch.ones(1)).wait()
    assert ended == [True]
    assert not manager.should_commit() and not group.works


def test_all_callbacks_get_a_failure_even_if_one_raises(fixture: Fixture) -> None:
    manager, _ = started(fixture)
    received: list[MemberFailure] = []

    def broken(_: MemberFailure) -> None:
        raise ValueError("a mistake of the user's")

    manager.subscribe_failures(broken)
    manager.subscribe_failures(received.append)
    manager._failures.member_failed(failure())
    assert received == [failure()]


def test_callbacks_get_a_failure_when_the_group_cannot_be_aborted(fixture: Fixture) -> None:
    group = PendingGroup()
    received: list[MemberFailure] = []

    def broken() -> None:
        raise RuntimeError("no abort")

    manager = fixture.manager(pg=group)
    manager.subscribe_failures(received.append)
    group.connecting, group.on_abort = lambda: manager._failures.member_failed(failure()), broken
    manager.start_quorum()
    manager.wait_quorum()
    assert received == [failure()]


def test_a_failure_after_the_last_collective_costs_nothing(fixture: Fixture) -> None:
    manager, group = started(fixture)
    work = manager.allreduce(torch.ones(1))
    group.works[0].future.set_result(None)
    assert work.wait()
    manager._failures.member_failed(failure())
    assert manager.should_commit() and group.aborts == 0


def test_a_job_that_regresses_is_said_in_the_log_of_the_rank(
    fixture: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    manager, _ = started(fixture)
    reason = "the job had reached step 5 in quorum 1, the members that ask are at step 2 at most"
    manager._failures.regressed(MemberFailure(quorum_id=2, replica_id="", reason=reason))
    assert "THE JOB REGRESSES in quorum 2" in caplog.text and reason in caplog.text
    assert manager.should_commit()


def test_an_abort_that_ends_the_work_whose_error_caused_it(fixture: Fixture) -> None:
    """After a timeout, waiting for a work aborts the group, which completes that same work."""
    manager, group = started(fixture)
    work = manager.allreduce(torch.ones(1))
    future = work.get_future()
    waiter = threading.Thread(target=work.wait, args=[timedelta(milliseconds=50)], daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
    future.wait()
    assert group.aborts == 1 and not manager.should_commit()


def test_a_failure_is_recorded_with_its_phases(
    fixture: Fixture, make_quorum: Callable[..., QuorumResult]
) -> None:
    manager, group = started(fixture)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torchft_failures")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        manager.allreduce(torch.ones(1))
        manager._failures.member_failed(failure())
        assert not manager.should_commit() and not records
        fixture.client._quorum.return_value = make_quorum(quorum_id=2)
        manager.start_quorum()
        work = manager.allreduce(torch.ones(1))
        group.works[-1].future.set_result(None)
        assert work.wait() and manager.should_commit()
        manager.start_quorum()
        assert manager.should_commit()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (record,) = records
    assert record.__dict__["steps_lost"] == 1 and record.__dict__["failed_quorum_id"] == 1
    phases = ["abort", "vote", "quorum", "reconfigure", "next_step"]
    seconds = [record.__dict__[f"{phase}_seconds"] for phase in phases]
    assert sum(seconds) == pytest.approx(record.__dict__["total_seconds"])
    assert "group_0:uuid of quorum 1 failed" in record.getMessage()


def test_the_activity_that_a_rank_reports(fixture: Fixture) -> None:
    """The report shows whether a rank computes or waits for its peers. A rank that waits does not stall the
    step.
    """
    manager, group = started(fixture)
    assert manager._failures.progress() == (False, "computes, after 0 collectives of this step", "")
    manager.allreduce(torch.ones(1))
    manager.allreduce(torch.ones(1))
    group.works[0].future.set_result(None)
    assert manager._failures.progress() == (True, "waits for its peers in collective 1 of this step", "")
    group.works[1].future.set_result(None)
    assert manager._failures.progress() == (False, "computes, after 2 collectives of this step", "")
