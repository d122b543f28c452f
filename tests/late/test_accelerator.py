"""Operations of a group on a device: deadlines, how long tensors are kept, and errors that only the backend
reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions

from tests.late.group import together
from tests.late.one_rank import Group, OneRank
from tests.unit.waiting import wait_until
from torchft import futures
from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroup, ProcessGroupWrapper


@pytest.fixture
def group(late: ModuleType) -> Iterator[Group]:
    group = Group()
    yield group
    group.backend.peer_comes()
    group.shutdown()


def ones(n: int = 4) -> torch.Tensor:
    return torch.ones(n, device="late")


@pytest.mark.parametrize("through_future", [False, True])
def test_reduced_tensors_are_freed_long_before_the_deadline(group: Group, through_future: bool) -> None:
    """Otherwise a minute's worth of gradients would accumulate."""

    def live() -> int:
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated()

    def step() -> None:
        tensor = ones(1 << 18)
        work = group.allreduce([tensor], ReduceOp.SUM)
        if through_future:
            work.get_future().wait()
        else:
            work.wait()

    for _ in range(3):
        step()
    before = live()
    for _ in range(100):
        step()
    assert live() <= before


def test_timers_of_finished_operations_are_removed(group: Group) -> None:
    timers = futures._TIMEOUT_MANAGER
    tensor = ones()
    for _ in range(2000):
        group.allreduce([tensor], ReduceOp.SUM).wait()
        torch.accelerator.synchronize()
    assert len(timers.pending) < 100


def test_the_operations_of_a_step_wake_the_timers_thread_once(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets with futures, as DDP reduces them, and with waits."""
    timers = futures._TIMEOUT_MANAGER
    timers.shutdown()
    wakes, notify = list[None](), timers._cond.notify

    def counted() -> None:
        wakes.append(None)
        notify()

    monkeypatch.setattr(timers._cond, "notify", counted)
    works = [group.allreduce([ones()], ReduceOp.SUM) for _ in range(100)]
    ended = [work.get_future() for work in works[::2]]
    for work in works:
        work.wait()
    for each in ended:
        each.wait()
    assert len(wakes) == 1
    assert len({id(work._deadline) for work in works}) == 1  # type: ignore[attr-defined]


def test_an_operation_that_hangs_is_aborted_at_its_deadline(group: Group) -> None:
    group.backend.hang()
    backend = group.backend
    opts = AllreduceOptions()
    opts.timeout = timedelta(milliseconds=50)
    work = group.allreduce([ones()], opts)
    work.wait()
    del work  # no reference is needed: the deadline applies nevertheless
    wait_until(lambda: backend.aborts == 1)
    assert "aborted" in str(group.errored())


@pytest.mark.parametrize("deadline", [None, timedelta(milliseconds=50)])
def test_a_synchronous_operation_returns_a_work(group: Group, deadline: timedelta | None) -> None:
    """`dist.all_reduce(tensor, group=...)`: PyTorch's NCCL returns no work for it."""
    opts = AllreduceOptions()
    opts.asyncOp = False
    if deadline is not None:
        opts.timeout = deadline
        group.backend.hang()
    backend, tensor = group.backend, ones()
    work = group.allreduce([tensor], opts)
    assert work.wait()
    if deadline is None:
        assert tensor.tolist() == [2, 2, 2, 2]
        assert work.is_completed()
    else:
        assert not work.is_completed()
        wait_until(lambda: backend.aborts == 1)


def test_a_failure_that_the_backend_handles_itself_is_known(group: Group) -> None:
    """The backend aborts its communicator, and the operation ends as if it had succeeded."""
    group.backend.hang()
    tensor = ones()
    work = group.allreduce([tensor], ReduceOp.SUM)
    work.wait()
    assert not work.is_completed()
    group.backend.fail()
    assert "late reports COMM_ERROR" in str(group.errored())
    assert tensor.isnan().all()


def test_the_deadline_of_a_future_names_the_devices_of_its_tensors_alone(late: ModuleType) -> None:
    """Each device that a future names gets a stream, on CUDA also a context of hundreds of MB."""
    pending: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[torch.device("late", 0)])
    with patch.object(futures, "_devices", side_effect=AssertionError("it asks for all devices")):
        timed = futures.timed(pending, timedelta(seconds=20), [torch.device("late", 0)])
    pending.set_result(ones())
    assert timed.wait().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        (lambda: [torch.ones(2, device="meta")], "on the meta device"),
        (lambda: [torch.eye(2).to_sparse()], "of layout torch.sparse_coo"),
        (lambda: [ones(), torch.ones(4)], "on cpu, late:0"),
    ],
    ids=["meta", "sparse", "two devices"],
)
def test_tensors_that_cannot_be_reduced_are_refused_by_name(
    group: Group, tensors: Callable[[], list[torch.Tensor]], what: str
) -> None:
    with pytest.raises(ValueError, match=f"torchft-late: allreduce of .* {what}"):
        group.allreduce(tensors(), ReduceOp.SUM)


def test_a_graph_that_captures_an_operation_is_refused_by_name(group: Group) -> None:
    with (
        patch.object(torch.get_device_module(), "is_current_stream_capturing", lambda: True, create=True),
        pytest.raises(RuntimeError, match="torchft-late: allreduce cannot be captured into a graph"),
    ):
        group.allreduce([ones()], ReduceOp.SUM)


def test_a_synchronous_operation_of_a_native_group_is_no_error(late: ModuleType) -> None:
    opts = AllreduceOptions()
    opts.asyncOp = False
    group = ErrorSwallowingProcessGroupWrapper(Group())
    group._pg = ProcessGroupWrapper(pg=OneRank())
    tensor = ones()
    assert group.allreduce([tensor], opts).wait()
    assert group.error() is None and tensor.tolist() == [2, 2, 2, 2]


def test_an_abort_while_an_operation_is_launched_is_known_to_its_wait(group: Group) -> None:
    backend = group.backend
    backend.hang()
    launch = backend.allreduce

    def launch_then_abort(*given: Any) -> Any:
        work = launch(*given)
        group.abort()  # aborted by another thread
        return work

    with patch.object(backend, "allreduce", launch_then_abort):
        work = group.allreduce([ones()], ReduceOp.SUM)
    with pytest.raises(RuntimeError, match="ended with its group"):
        work.wait()


def test_asking_for_an_error_does_not_wait_for_the_device(group: Group, late: ModuleType) -> None:
    """In particular it does not wait for streams that do not belong to the group."""
    group.set_timeout(timedelta(seconds=0.1))
    side = torch.Stream("late")
    answers: list[Exception | None] = []
    asking = threading.Thread(target=lambda: answers.append(group.errored()))
    with late.held(side):
        with side:
            ones()
        asking.start()
        asking.join(5)
        assert not asking.is_alive() and answers == [None]
    assert group.backend.aborts == 0


@pytest.mark.parametrize("async_op", [True, False])
def test_a_deadline_watches_the_device_of_the_tensors(late: ModuleType, async_op: bool) -> None:
    """The caller's current device is a different one."""
    aborted = threading.Event()

    def rank(r: int, pg: ProcessGroup) -> None:
        if r == 1:
            assert aborted.wait(20), "its peer waits for ever"
            return
        opts = AllreduceOptions()
        opts.timeout, opts.asyncOp = timedelta(milliseconds=50), async_op
        tensor = torch.ones(4, device="late:0")
        torch.accelerator.set_device_index(2)
        work = pg.allreduce([tensor], opts)
        assert not work.is_completed()
        work.wait()
        wait_until(lambda: pg.errored() is not None)
        aborted.set()

    together(rank)
