"""What goes wrong on a device when one process does not wait for the other. Each fails with wrong numbers then."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed import Work

from tests.unit.process_group.isolated import simulated
from tests.unit.process_group.isolated.simulated import TRAINER, WORKER, Device

COUNT = 16


class Group(Protocol):
    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work: ...


def _start(group: Group, device: Device, tensor: torch.Tensor) -> Work:
    """Begins an operation, and returns when the worker has queued it."""
    sent = device.sent(WORKER)
    work = group.allreduce([tensor], torch.distributed.ReduceOp.SUM)
    device.wait_for(lambda: device.sent(WORKER) > sent)
    return work


def _let_go(device: Device) -> None:
    """The worker's device does all that was queued on it."""
    device.hold(WORKER, False)
    device.wait_for(lambda: not device.busy(WORKER))


def _check(values: list[torch.Tensor], expected: float, why: str) -> None:
    assert values and values[0].tolist() == [expected] * COUNT, f"{why}: {values}"


def input_is_written_late(group: Group, device: Device) -> None:
    """The operation is asked for while the kernel that makes its input still runs."""
    tensor = device.empty(COUNT)
    device.hold(TRAINER)
    device.write(tensor, 3)
    work = _start(group, device, tensor)
    device.hold(TRAINER, False)
    work.wait()
    values = device.read(tensor)
    device.synchronize()
    _check(values, 6, "the worker read what the trainer had not yet written")


def result_is_read_early(group: Group, device: Device) -> None:
    """The trainer goes on to use the result while the collective still runs."""
    tensor = device.empty(COUNT)
    device.write(tensor, 3)
    device.hold(WORKER)
    work = _start(group, device, tensor)
    work.wait()
    values = device.read(tensor)
    device.hold(WORKER, False)
    device.synchronize()
    _check(values, 6, "the trainer read what the worker had not yet written")


def input_is_overwritten_early(group: Group, device: Device) -> None:
    """The trainer writes its input anew as soon as its stream has waited."""
    tensor = device.empty(COUNT)
    device.write(tensor, 3)
    device.hold(WORKER)
    work = _start(group, device, tensor)
    work.wait()
    device.write(tensor, 5)
    _let_go(device)
    values = device.read(tensor)
    device.synchronize()
    _check(values, 5, "the worker wrote after the trainer, who had waited")


def memory_is_reused(group: Group, device: Device) -> None:
    """The caller drops the tensor, and nobody waits, while the collective still runs."""
    tensor = device.empty(COUNT)
    device.write(tensor, 3)
    device.hold(WORKER)
    work = _start(group, device, tensor)
    del tensor, work
    # What is over is given back while others are begun.
    for _ in range(2):
        another = device.empty(COUNT)
        device.write(another, 1)
        device.wait_for(_start(group, device, another).is_completed)
    other = device.empty(COUNT)
    device.write(other, 7)
    _let_go(device)
    values = device.read(other)
    device.synchronize()
    _check(values, 7, "the worker wrote into memory that was somebody else's by then")


# What each way of leaving something out does.
NOTICED_BY = {
    simulated.WORKER_DOES_NOT_FOLLOW: [input_is_written_late],
    simulated.TRAINER_DOES_NOT_FOLLOW: [result_is_read_early, input_is_overwritten_early],
    simulated.FREED_TOO_EARLY: [memory_is_reused],
}
ALL = [input_is_written_late, result_is_read_early, input_is_overwritten_early, memory_is_reused]
