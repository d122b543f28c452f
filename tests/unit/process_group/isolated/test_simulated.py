"""The simulated device itself, and that it notices who does not wait: both ends of the seam in one process."""

from __future__ import annotations

import os
from collections import deque
from datetime import timedelta
from typing import Callable, Iterator, Optional

import pytest
import torch
from torch.distributed import ReduceOp, Work

from tests.unit.process_group.isolated import scenarios, simulated
from tests.unit.process_group.isolated.simulated import TRAINER, WORKER, Device, LateGroup
from torchft.process_group.isolated.sharing import Lease, Sharing


class _SentWork(Work):
    def __init__(self, trainer: Sharing, mark: bytes) -> None:
        super().__init__()
        self._trainer = trainer
        self._mark = mark

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        self._trainer.follow(self._mark)
        return True

    def is_completed(self) -> bool:
        return True


class TwoEnds:
    """The order in which an isolated group and its worker use the seam, without a worker's process."""

    def __init__(self, trainer: Sharing, worker: Sharing) -> None:
        self._trainer, self._worker = trainer, worker
        self._group = LateGroup(0, 1)
        self._leases: deque[tuple[bytes, list[Lease]]] = deque()

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work:
        while self._leases and self._trainer.reached(self._leases[0][0]):
            for lease in self._leases.popleft()[1]:
                lease.release()
        leases = [self._trainer.lend(tensor, True, True) for tensor in tensors]
        self._worker.follow(self._trainer.mark())
        self._group.allreduce([self._worker.borrow(lease.ref) for lease in leases]).wait()
        mark = self._worker.mark()
        self._leases.append((mark, leases))
        return _SentWork(self._trainer, mark)


@pytest.fixture
def device() -> Iterator[Device]:
    device = simulated.CURRENT = Device(None, TRAINER)
    yield device
    theirs, simulated.CURRENT = simulated.CURRENT, None
    simulated.BROKEN.clear()
    device.close()
    if theirs is not None and theirs is not device:
        theirs.close()


def two_ends(broken: set[str]) -> TwoEnds:
    simulated.BROKEN.update(broken)
    worker = simulated.worker()
    # A descriptor that is the worker's own, as it is when it was sent to another process.
    trainer = simulated.trainer(lambda note, descriptor: worker.told(note, os.dup(descriptor)))  # type: ignore
    return TwoEnds(trainer, worker)


@pytest.mark.parametrize("scenario", scenarios.ALL, ids=lambda scenario: scenario.__name__)
def test_nothing_goes_wrong_when_everybody_waits(
    device: Device, scenario: Callable[[scenarios.Group, Device], None]
) -> None:
    scenario(two_ends(set()), device)


@pytest.mark.parametrize(
    ("broken", "scenario"),
    [(broken, scenario) for broken, noticed in scenarios.NOTICED_BY.items() for scenario in noticed],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_whoever_does_not_wait_is_noticed(
    device: Device, broken: str, scenario: Callable[[scenarios.Group, Device], None]
) -> None:
    with pytest.raises(AssertionError, match=r"^the (worker|trainer) (read|wrote)"):
        scenario(two_ends({broken}), device)


def test_memory_is_garbage_until_a_kernel_has_run(device: Device) -> None:
    tensor = device.empty(4)
    device.hold(TRAINER)
    device.write(tensor, 1)
    assert tensor.isnan().all()
    device.hold(TRAINER, False)
    device.synchronize()
    assert tensor.tolist() == [1, 1, 1, 1]


def test_freed_memory_is_the_next_to_be_used(device: Device) -> None:
    tensor = device.empty(4)
    where, view = device.where(tensor), tensor[:2]
    del tensor
    assert device.where(device.empty(4)) != where  # a view keeps it
    del view
    assert device.where(device.empty(3)) == where


def test_streams_run_apart_and_in_order(device: Device) -> None:
    done: list[str] = []
    other = device.stream()
    device.default.wait(simulated._WORDS - 1)  # a mark that nobody has made yet
    device.default.do(lambda: done.append("late"))
    other.do(lambda: done.append("early"))
    assert done == ["early"]
    device.set_word(simulated._WORDS - 1, 1)
    device.synchronize()
    assert done == ["early", "late"]


def test_leases_are_given_back(device: Device) -> None:
    group = two_ends(set())
    for _ in range(10):
        tensor = device.empty(4)
        device.write(tensor, 1)
        group.allreduce([tensor], ReduceOp.SUM).wait()
    device.synchronize()
    del tensor
    assert len(device._blocks) <= 2, "memory of operations that are long over is kept"
    assert simulated.CURRENT is not None and simulated.CURRENT.side == WORKER
