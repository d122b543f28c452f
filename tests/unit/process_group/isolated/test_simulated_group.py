"""The real group and its real worker over the simulated device: neither runs ahead of the other."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Callable, Iterator

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from tests.promises import ABORT_S, within
from tests.unit.process_group.isolated import scenarios, simulated
from tests.unit.process_group.isolated.simulated import TRAINER, WORKER, Device
from tests.unit.process_group.isolated.simulated_group import ProcessGroupBabyLate
from tests.unit.process_group.ranks import TIMEOUT, meeting
from torchft.futures import future_wait

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def started() -> Iterator[ProcessGroupBabyLate]:
    group = ProcessGroupBabyLate(timeout=TIMEOUT)
    yield group
    group.shutdown()


@pytest.fixture
def device() -> Iterator[Device]:
    device = simulated.CURRENT = Device(None, TRAINER)
    yield device
    simulated.CURRENT = None
    simulated.BROKEN.clear()
    device.close()


@pytest.fixture
def group(started: ProcessGroupBabyLate, store: TCPStore, device: Device) -> ProcessGroupBabyLate:
    # A new worker, which gets to know the device of this test.
    started.configure(meeting(store), "replica", 0, 1)
    return started


Scenario = Callable[[scenarios.Group, Device], None]


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_neither_runs_ahead(group: ProcessGroupBabyLate, device: Device, scenario: Scenario) -> None:
    scenario(group, device)
    scenario(group, device)
    assert group.errored() is None


@pytest.mark.parametrize(
    ("broken", "scenario"),
    [(broken, scenario) for broken, noticed in scenarios.NOTICED_BY.items() for scenario in noticed],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_these_tests_would_notice(group: ProcessGroupBabyLate, device: Device, broken: str, scenario: Scenario) -> None:
    simulated.BROKEN.add(broken)
    with pytest.raises(AssertionError, match=r"^the (worker|trainer) (read|wrote)"):
        scenario(group, device)


def test_a_future_waits_too(group: ProcessGroupBabyLate, device: Device) -> None:
    tensor = device.empty(scenarios.COUNT)
    device.write(tensor, 3)
    device.hold(WORKER)
    future = group.allreduce([tensor], ReduceOp.SUM).get_future()
    values: list[list[torch.Tensor]] = []
    # On the thread that completes futures, whose stream waits for the operation.
    read = future.then(lambda done: values.append(device.read(done.value()[0])))  # type: ignore
    read.wait()
    device.hold(WORKER, False)
    device.synchronize()
    assert values[0][0].tolist() == [6] * scenarios.COUNT


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "ON_HOST", True)


def test_whoever_waits_on_the_host_has_the_result(group: ProcessGroupBabyLate, device: Device, on_host: None) -> None:
    tensor = device.empty(scenarios.COUNT)
    device.write(tensor, 3)
    device.hold(WORKER)
    work = scenarios._start(group, device, tensor)
    threading.Timer(0.05, device.hold, (WORKER, False)).start()
    work.wait()
    assert tensor.tolist() == [6] * scenarios.COUNT


def test_whoever_waits_on_the_host_notices_the_workers_end(
    group: ProcessGroupBabyLate, device: Device, on_host: None
) -> None:
    device.hold(WORKER)
    tensor = device.empty(scenarios.COUNT)
    device.write(tensor, 3)
    work = scenarios._start(group, device, tensor)
    # The worker has answered: what is waited for is its device.
    device.wait_for(work.is_completed)
    worker = group._worker
    assert worker is not None
    threading.Timer(0.05, worker._server.kill, (worker._number,)).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="the worker process died"):
        work.wait()
    assert time.monotonic() - began < within(ABORT_S)
    assert isinstance(group.errored(), RuntimeError)


def test_a_wait_on_the_host_has_a_deadline(group: ProcessGroupBabyLate, device: Device, on_host: None) -> None:
    device.hold(WORKER)
    tensor = device.empty(scenarios.COUNT)
    device.write(tensor, 3)
    work = scenarios._start(group, device, tensor)
    in_the_end = threading.Timer(20, device.hold, (WORKER, False))
    in_the_end.start()
    began = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(milliseconds=50))
        assert time.monotonic() - began < within(0.05)
    finally:
        in_the_end.cancel()
        device.hold(WORKER, False)


def test_a_future_ends_with_the_worker(group: ProcessGroupBabyLate, device: Device, on_host: None) -> None:
    device.hold(WORKER)
    tensor = device.empty(scenarios.COUNT)
    device.write(tensor, 3)
    work = scenarios._start(group, device, tensor)
    future = work.get_future()
    device.wait_for(work.is_completed)
    worker = group._worker
    assert worker is not None
    worker._server.kill(worker._number)
    with pytest.raises(RuntimeError, match="the worker process died"):
        future_wait(future, TIMEOUT / 2)


def test_memory_is_given_back(group: ProcessGroupBabyLate, device: Device) -> None:
    for _ in range(20):
        tensor = device.empty(scenarios.COUNT)
        device.write(tensor, 1)
        group.allreduce([tensor], ReduceOp.SUM).wait()
        device.synchronize()
    del tensor
    assert group.errored() is None
    assert len(device._blocks) <= 1, "memory of operations that are long over is kept"


def test_the_memory_of_a_killed_worker_is_given_back(
    group: ProcessGroupBabyLate, device: Device, store: TCPStore
) -> None:
    device.hold(WORKER)
    tensor = device.empty(scenarios.COUNT)
    device.write(tensor, 3)
    work = scenarios._start(group, device, tensor)
    del tensor
    assert len(device._blocks) == 1
    began = time.monotonic()
    group.abort()
    assert time.monotonic() - began < within(ABORT_S)
    assert isinstance(group.errored(), RuntimeError)
    del work
    device.wait_for(lambda: not device._blocks)
    other = simulated.CURRENT = Device(None, TRAINER)
    group.configure(meeting(store), "replica", 0, 1)
    scenarios.input_is_written_late(group, other)
    other.close()
