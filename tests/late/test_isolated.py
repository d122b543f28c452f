"""Isolated groups on the test device: trainer and worker each wait for the other's device.

There is one rank, whose sums are doubled. Each task of the worker's device is delayed. The trainer's stream
waits for the worker's; with the fixture `refused`, the driver refuses that and the host waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore, Work

from tests.late import load
from tests.promises import ABORT_S, within
from tests.unit.manager.conftest import Fixture, fixture, quorum
from torchft.futures import future_wait

load()
from tests.late.isolated import ProcessGroupBabyLate, sharing  # noqa: E402
from tests.late.observed import until  # noqa: E402
from tests.late.workers import (  # noqa: E402
    ProcessGroupBabyFailing,
    ProcessGroupBabyHanging,
    ProcessGroupBabyHasty,
    ProcessGroupBabyRefused,
    ProcessGroupBabySlow,
    ProcessGroupBabyStuck,
)
from torchft.process_group.isolated import channel, protocol, values  # noqa: E402

__all__ = ["fixture"]

TIMEOUT = timedelta(seconds=30)
COUNT = 1000


def started(kind: type[ProcessGroupBabyLate]) -> Iterator[ProcessGroupBabyLate]:
    group = kind(timeout=TIMEOUT)
    try:
        configure(group)
        yield group
    finally:
        group.shutdown()


def configure(group: ProcessGroupBabyLate) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    group.configure(f"localhost:{store.port}/isolated", "replica", 0, 1)


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcessGroupBabyLate]:
    yield from started(ProcessGroupBabySlow)


@pytest.fixture
def group(late, shared: ProcessGroupBabyLate) -> ProcessGroupBabyLate:
    if shared.errored() is not None:
        configure(shared)
    return shared


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers from now on."""
    monkeypatch.setattr(sharing, "_pages_of", lambda device: values.Pages(lambda: None))


def full(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value, device="late")


def double(group: ProcessGroupBabyLate, tensor: torch.Tensor) -> Work:
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist._make_nccl_premul_sum(2.0)
    return group.allreduce([tensor], opts)


def queued(work: Any) -> None:
    """Waits until the worker has queued the operation."""
    until(lambda: work._op.done)


def may_run_ahead(late: Any, tensor: torch.Tensor) -> None:
    """Waits, with the trainer's device held, until the worker has written to the tensor, for at most 0.3
    s.
    """
    before, deadline = late.cpu_view(tensor)[-1].item(), time.monotonic() + 0.3
    while late.cpu_view(tensor)[-1].item() == before and time.monotonic() < deadline:
        time.sleep(0.001)


def test_the_worker_follows_the_trainers_device(group, late):
    x = full(1)
    torch.accelerator.synchronize()
    with late.held():
        x.fill_(3)
        work = double(group, x)
        queued(work)
        may_run_ahead(late, x)
    work.wait()
    assert x.tolist() == [6] * COUNT


def test_operations_leave_the_current_device_as_it_is(late):
    """The driver's calls do not: they set the context of their device."""
    with torch.late.device(2):  # type: ignore[attr-defined]
        for group in started(ProcessGroupBabyLate):
            x = torch.ones(COUNT, device="late")
            with torch.late.device(0):  # type: ignore[attr-defined]
                work = double(group, x)
                assert torch.accelerator.current_device_index() == 0
                work.wait()
                assert torch.accelerator.current_device_index() == 0
            assert x.tolist() == [2] * COUNT


def test_operations_after_the_workers_end_keep_nothing(late):
    """The first operation of a worker takes a page of values."""
    for group in started(ProcessGroupBabyLate):
        group._connected().close(RuntimeError("the worker has ended"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the worker has ended"):
                double(group, full(1))
            free = sharing._pages_of(full(1).device)._free.copy()
        assert free
        with pytest.raises(RuntimeError, match="the worker has ended"):
            double(group, full(1))
        assert sharing._pages_of(full(1).device)._free == free


def test_a_worker_that_does_not_follow_is_noticed(late):
    groups = started(ProcessGroupBabyHasty)
    group = next(groups)
    x = full(1)
    torch.accelerator.synchronize()
    with late.held():
        x.fill_(3)
        double(group, x)
        until(lambda: late.cpu_view(x)[-1].item() == 2)
    groups.close()


def test_the_trainer_follows_the_workers_device(group):
    x = full(3)
    double(group, x).wait()
    y = x * 1
    x.fill_(5)
    assert y.tolist() == [6] * COUNT
    double(group, x).wait()
    assert x.tolist() == [10] * COUNT


def test_a_trainer_that_does_not_follow_is_noticed(group, monkeypatch):
    x = full(3)
    with monkeypatch.context() as patch:
        patch.setattr(sharing.TrainerEnd, "follow", lambda end, mark: None)
        patch.setattr(sharing.TrainerEnd, "reached", lambda end, mark: True)
        double(group, x).wait()
        assert (x * 1).tolist() == [3] * COUNT
    double(group, full(1)).wait()


def reuse(group: ProcessGroupBabyLate) -> list[float]:
    """Drops an operation and its tensor without a wait; then memory of the same size is allocated
    elsewhere.
    """
    another = full(1)
    double(group, another).wait()
    x = full(3)
    queued(double(group, x))
    del x
    queued(double(group, another))
    other = full(7)
    double(group, another).wait()
    return other.tolist()


def test_memory_is_not_used_again_while_the_worker_may_write(group):
    assert reuse(group) == [7] * COUNT


def test_memory_that_is_used_too_early_is_noticed(group, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sharing.TrainerEnd, "reached", lambda end, mark: True)
        # Otherwise the storage would still keep the memory for the worker, which may have mapped it.
        patch.setattr(sharing, "_hold", lambda storage, holder: _unkept(storage, holder))
        assert reuse(group) != [7] * COUNT


def _unkept(storage: torch.UntypedStorage, holder: object) -> object:
    export = sharing._Export(storage)
    export.release_now()
    export.holders.add(holder)
    return export


def test_a_future_waits_too(group):
    done = double(group, full(3)).get_future().then(lambda f: f.value()[0] * 1)
    assert future_wait(done, TIMEOUT).tolist() == [6] * COUNT


@pytest.mark.parametrize("how", ["wait", "future"])
def test_a_synchronous_operation_follows_the_trainer_and_is_followed(group, late, how: str):
    """`dist.all_reduce(tensor, group=...)`: the backend queues it on the worker's current stream, and
    returns no work.
    """
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    opts.reduceOp = dist._make_nccl_premul_sum(2.0)
    x = full(1)
    torch.accelerator.synchronize()
    with late.held():
        x.fill_(3)
        work = group.allreduce([x], opts)
        queued(work)
        may_run_ahead(late, x)
        assert not work.is_success()
    if how == "wait":
        assert work.wait()
    else:
        future_wait(work.get_future(), TIMEOUT)
    assert x.tolist() == [6] * COUNT and work.is_success()


def test_memory_is_returned(group):
    def used() -> int:
        torch.accelerator.synchronize()
        return torch.accelerator.memory_allocated()

    double(group, full(1)).wait()
    before = used()
    for _ in range(10):
        double(group, full(1)).wait()
        torch.accelerator.synchronize()

    def returned() -> bool:
        """Freed memory is known to be unmapped after one of the next operations, a later one on a busy
        host.
        """
        double(group, full(1)).wait()
        return used() <= before + 3 * 4 * COUNT

    until(returned)


# The host does not wait


@pytest.mark.parametrize("how", ["wait", "future"])
def test_the_host_goes_on_while_a_stream_waits(group, late, how: str):
    """The worker's operation cannot begin before the trainer's device is released."""
    x = full(1)
    torch.accelerator.synchronize()
    with late.held():
        x.fill_(3)
        work = double(group, x)
        if how == "wait":
            assert work.wait()
        else:
            future_wait(work.get_future(), TIMEOUT)
        y = x * 1
        x.fill_(5)
        assert not work.is_completed() and late.pending() >= 3
    assert y.tolist() == [6] * COUNT and x.tolist() == [5] * COUNT
    assert work.is_success()


def test_the_stream_of_a_call_does_not_wait_for_the_future(group, late):
    """A hook of DDP asks for the future of each bucket while the stream goes on with the backward pass."""
    x = full(3)
    worker = group._worker
    with late.held(channel._own_stream(x.device)):
        future = double(group, x).get_future()
        doubled = future.then(lambda f: f.value()[0] * 1)
        assert (full(1) + 1).tolist() == [2] * COUNT
        future_wait(future, TIMEOUT)
    assert future_wait(doubled, TIMEOUT).tolist() == [6] * COUNT and group._worker is worker


def test_the_next_worker_continues_in_the_same_page(late):
    """A stream may still have to come to a wait for the worker before it."""
    for group in started(ProcessGroupBabySlow):
        double(group, full(1)).wait()
        torch.accelerator.synchronize()
        pages = len(values._kept)
        for _ in range(3):
            end = group._worker.devices._sharings[protocol.DEVICES.index("late")]
            kill(group)
            until(partial(lambda end: end._closed, end))
            configure(group)
            x = full(3)
            with late.held():
                double(group, x).wait()
                y = x * 1
            assert y.tolist() == [6] * COUNT
        assert len(values._kept) == pages


def test_the_host_waits_where_the_driver_refuses(late, refused):
    for group in started(ProcessGroupBabySlow):
        x = full(3)
        work = double(group, x)
        assert work.wait() and work.is_success()
        assert future_wait(double(group, x).get_future(), TIMEOUT)[0].tolist() == [12] * COUNT


def test_the_host_waits_where_the_worker_is_refused(late):
    for group in started(ProcessGroupBabyRefused):
        work = double(group, x := full(3))
        assert work.wait() and work.is_success() and x.tolist() == [6] * COUNT


# The worker's device never finishes


@pytest.fixture(scope="module")
def hanging() -> Iterator[ProcessGroupBabyLate]:
    yield from started(ProcessGroupBabyHanging)


@pytest.fixture
def stuck(late, hanging: ProcessGroupBabyLate) -> ProcessGroupBabyLate:
    configure(hanging)  # a new worker, because the previous one may still hang
    return hanging


def kill(group: ProcessGroupBabyLate) -> None:
    """As the kernel does when memory runs out."""
    group._worker.kill()


@pytest.mark.parametrize("how", ["wait", "future"])
def test_a_stream_goes_on_when_the_worker_is_killed(stuck, how: str):
    """The worker ends while the host waits for its own device, and makes no call of the group."""
    x = full(3)
    work = double(stuck, x)
    if how == "wait":
        work.wait()
    else:
        future_wait(work.get_future(), TIMEOUT)
    y = x * 0
    assert not work.is_completed()
    kill(stuck)
    torch.accelerator.synchronize()
    assert isinstance(stuck.errored(), RuntimeError) and "the worker process has ended" in str(
        stuck.errored()
    )
    assert work.is_completed() and not work.is_success() and work.exception() is not None
    assert y.isfinite().all()
    with pytest.raises(RuntimeError, match="the worker process has ended"):
        work.wait()


def test_a_stream_that_nobody_frees_is_noticed(stuck, late, monkeypatch):
    """Nothing of the killed worker lets it continue."""
    release = values.Awaited.release
    kept: list[values.Awaited] = []
    with monkeypatch.context() as patch:
        patch.setattr(values.Awaited, "release", lambda awaited: kept.append(awaited))
        double(stuck, full(3)).wait()
        kill(stuck)
        until(lambda: bool(kept))
        late.host_timeout_ms(100)
        with pytest.raises(RuntimeError, match="host waited over 100 ms"):
            torch.accelerator.synchronize()
    late.host_timeout_ms(60000)
    release(kept[0])
    torch.accelerator.synchronize()


def test_a_stream_waits_until_the_deadline(stuck):
    opts = dist.AllreduceOptions()
    opts.timeout = timedelta(seconds=0.2)
    work = stuck.allreduce([full(1.0)], opts)
    began = time.monotonic()
    assert work.wait()
    torch.accelerator.synchronize()
    assert 0.2 <= time.monotonic() - began < within(0.2)
    assert "timed out: it did not complete within 0.2 s" in str(stuck.errored())


def test_a_stream_waits_as_long_as_the_caller_says(stuck):
    work = double(stuck, full(3))
    assert work.wait(timedelta(seconds=0.1))
    torch.accelerator.synchronize()
    assert "timed out: it did not complete within 0.1 s" in str(stuck.errored())


def test_a_step_whose_worker_is_killed_is_not_committed(late, fixture: Fixture) -> None:
    for group in started(ProcessGroupBabyHanging):
        fixture.client._quorum.return_value = quorum(reconfigure_handles=[group.get_reconfigure_handle()])
        manager = fixture.manager(pg=group, timeout=TIMEOUT)
        manager.start_quorum()
        manager.wait_quorum()
        x = full(1.0)
        assert manager.allreduce(x).wait()
        y = x * 1
        assert manager.errored() is None
        kill(group)
        assert not manager.should_commit()
        assert "the worker process has ended" in str(manager.errored())
        assert y.numel() == COUNT


def test_a_failure_that_the_workers_backend_handles_itself_is_known_before_the_vote(late) -> None:
    """Its value is written as if the operation had succeeded."""
    for kind in (ProcessGroupBabyFailing, ProcessGroupBabyStuck):
        for group in started(kind):
            group.allreduce([full(1.0)], dist.ReduceOp.SUM).wait()
            assert group.errored() is None
            assert group.allreduce([full(1.0)], dist.ReduceOp.SUM).wait()
            torch.accelerator.synchronize()
            assert "COMM_ERROR" in str(group.errored())


# The host waits for it


def test_a_wait_has_a_deadline(refused, stuck):
    work = double(stuck, full(3))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        work.wait(timedelta(milliseconds=50))
    assert time.monotonic() - began < within(0.05)


def test_waits_end_when_the_worker_ends(refused, stuck):
    work = double(stuck, full(3))
    queued(work)
    threading.Timer(0.05, kill, (stuck,)).start()
    with pytest.raises(RuntimeError, match="the worker process has ended"):
        work.wait()
    assert isinstance(stuck.errored(), RuntimeError)


@pytest.mark.parametrize("asked", ["at once", "when the worker has answered"])
def test_a_future_ends_with_the_worker(refused, stuck, asked: str):
    """The host waits for the worker's device, on a thread of its own: `get_future` returns at once."""
    work = double(stuck, full(3))
    if asked != "at once":
        queued(work)
    future = work.get_future()
    queued(work)
    kill(stuck)
    with pytest.raises(RuntimeError, match="the worker process has ended"):
        future_wait(future, TIMEOUT / 2)


def test_an_abort_returns_the_memory(stuck):
    before = torch.accelerator.memory_allocated()
    work = double(stuck, full(3))
    queued(work)
    began = time.monotonic()
    stuck.abort()
    assert time.monotonic() - began < within(ABORT_S)
    del work
    until(lambda: torch.accelerator.memory_allocated() <= before)


@pytest.mark.parametrize("how", ["wait", "future", "errored"])
def test_a_failure_that_the_workers_backend_handles_itself_is_reported(late, refused, how: str) -> None:
    """Its event passes as if the operation had succeeded."""
    for group in started(ProcessGroupBabyFailing):
        group.allreduce([full(1.0)], dist.ReduceOp.SUM).wait()
        assert group.errored() is None
        work = group.allreduce([full(1.0)], dist.ReduceOp.SUM)
        if how == "errored":
            queued(work)
            assert "COMM_ERROR" in str(group.errored())
        else:
            with pytest.raises(RuntimeError, match="COMM_ERROR"):
                work.wait() if how == "wait" else future_wait(work.get_future(), TIMEOUT)


def test_a_failure_after_which_the_workers_device_hangs_is_reported(late, refused) -> None:
    """The operation's event never passes, so the error is not requested before the deadline."""
    for group in started(ProcessGroupBabyStuck):
        group.allreduce([full(1.0)], dist.ReduceOp.SUM).wait()
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=10)
        with pytest.raises(RuntimeError, match="COMM_ERROR"):
            group.allreduce([full(1.0)], opts).wait()


def test_an_operation_unfinished_on_the_workers_device_is_in_flight(late) -> None:
    """The failure bus aborts operations in flight."""
    for group in started(ProcessGroupBabyHanging):
        work = group.allreduce([full(1.0)], dist.ReduceOp.SUM)
        queued(work)
        assert not work.is_completed() and not work.is_success()
        group.abort()
        until(work.is_completed)
        assert not work.is_success() and work.exception() is not None


@pytest.mark.parametrize("streams", [True, False])
def test_an_isolated_group_behind_a_manager_ends_a_future_without_a_wait(
    late, fixture: Fixture, request: pytest.FixtureRequest, streams: bool
) -> None:
    """DDP's hooks request a future and wait for it."""
    for group in started(ProcessGroupBabyHanging):
        if not streams:
            request.getfixturevalue("refused")
        fixture.client._quorum.return_value = quorum(reconfigure_handles=[group.get_reconfigure_handle()])
        manager = fixture.manager(pg=group, timeout=timedelta(seconds=5))
        manager.start_quorum()
        manager.wait_quorum()
        assert manager.errored() is None
        manager._timeout = timedelta(seconds=0.3)
        future = manager.allreduce(full(1.0)).get_future()
        began = time.monotonic()
        future_wait(future, TIMEOUT)
        assert not manager.should_commit()
        assert time.monotonic() - began < within(0.3)
        assert "within 0.3 s" in str(manager.errored())
        assert group.errored() is not None, "the worker may still write"
        torch.accelerator.synchronize()


def test_an_operation_past_its_deadline_ends_the_worker(late, refused) -> None:
    """NCCL in the worker only knows the group's timeout."""
    for group in started(ProcessGroupBabyHanging):
        opts = dist.AllreduceOptions()
        opts.timeout = timedelta(seconds=0.2)
        work = group.allreduce([full(1.0)], opts)
        with pytest.raises(RuntimeError, match=r"timed out: it did not complete within 0\.2 s"):
            work.wait()
        assert work._channel.broken is not None, "the worker may still write"
        assert group.errored() is not None
