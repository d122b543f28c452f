"""Memory that belongs to torchft alone is moved to where an isolated group's worker can access it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp, TCPStore

from tests.unit.process_group.isolated.processes import standing_by
from tests.unit.process_group.ranks import TIMEOUT, meeting
from tests.unit.waiting import wait_until
from torchft.ddp import DistributedDataParallel
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)
from torchft.process_group.isolated import host


@pytest.fixture
def group(store: TCPStore) -> Iterator[ProcessGroupBabyGloo]:
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    yield group
    group.shutdown()


def staged(group: ProcessGroupBabyGloo) -> int:
    """Returns the bytes of memory into which tensors are copied."""
    worker = group._worker
    assert worker is not None
    sharing: Any = worker.devices.sharing(0)
    return sum(size * len(slots) for size, slots in sharing._free.items())


def test_all_views_follow_a_buffer(group: ProcessGroupBabyGloo) -> None:
    buffer = torch.arange(100_000.0)
    part, expected = buffer[10:20], buffer.clone()
    assert group.share_buffer(part)
    assert buffer.is_shared() and part.is_shared()
    assert torch.equal(buffer, expected)
    address = buffer.data_ptr()
    assert group.share_buffer(buffer)
    assert buffer.data_ptr() == address
    group.allreduce([buffer], ReduceOp.SUM).wait()
    assert staged(group) == 0
    buffer[10] = -1
    assert part[0] == -1


def test_a_plain_group_does_not_move_a_buffer(store: TCPStore) -> None:
    groups: list[ProcessGroup] = [ProcessGroupDummy(0, 1), ProcessGroupGloo(TIMEOUT)]
    for group in groups:
        buffer = torch.ones(100_000)
        address = buffer.data_ptr()
        assert not group.share_buffer(buffer)
        assert buffer.data_ptr() == address and not buffer.is_shared()


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda group: ProcessGroupWrapper(pg=group),
        lambda group: FakeProcessGroupWrapper(ErrorSwallowingProcessGroupWrapper(group)),
        lambda group: ManagedProcessGroup(SimpleNamespace(_pg=group)),  # type: ignore[arg-type]
    ],
    ids=["wrapper", "fake over error swallowing", "managed"],
)
def test_wrappers_pass_on_a_buffer(
    group: ProcessGroupBabyGloo, wrapped: Callable[[ProcessGroup], ProcessGroup]
) -> None:
    buffer = torch.ones(100_000)
    assert wrapped(group).share_buffer(buffer)
    assert buffer.is_shared()


def test_a_buffer_is_not_moved_when_shared_memory_is_short(
    group: ProcessGroupBabyGloo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.os, "statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
    buffer = torch.ones(100_000)
    assert not group.share_buffer(buffer)
    assert not buffer.is_shared()
    group.allreduce([buffer], ReduceOp.SUM).wait()
    assert torch.equal(buffer, torch.ones(100_000))


class Trainer:
    """The methods of a Manager that DistributedDataParallel calls."""

    def __init__(self, group: ProcessGroup) -> None:
        self._pg = group
        self.tensors: list[torch.Tensor] = []

    def allreduce(self, tensor: torch.Tensor) -> Any:
        self.tensors.append(tensor)
        work = self._pg.allreduce([tensor], ReduceOp.SUM)
        future = work.get_future().then(lambda future: future.value()[0])
        return SimpleNamespace(get_future=lambda: future, wait=work.wait)

    def report_error(self, e: Exception) -> None:
        raise e


@pytest.mark.parametrize("static", [False, True], ids=["", "static graph"])
@pytest.mark.parametrize("view", [True, False], ids=["bucket view", "no bucket view"])
def test_buckets_are_not_copied(group: ProcessGroupBabyGloo, view: bool, static: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    reference = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    reference.load_state_dict(model.state_dict())
    trainer: Any = Trainer(group)
    wrapped = DistributedDataParallel(
        trainer, model, bucket_cap_mb=1, gradient_as_bucket_view=view, static_graph=static
    )
    for step in range(4):
        trainer.tensors.clear()
        for module in (wrapped, reference):
            module.zero_grad()
            module(torch.full((2, 300), 1.0 + step)).sum().backward()
        for ours, expected in zip(model.parameters(), reference.parameters()):
            assert ours.grad is not None and expected.grad is not None
            assert torch.equal(ours.grad, expected.grad)
            if view:
                assert ours.grad.is_shared()
    assert len(trainer.tensors) > 1
    assert all(tensor.is_shared() for tensor in trainer.tensors)
    assert staged(group) == 0


def test_shared_buckets_are_freed(group: ProcessGroupBabyGloo) -> None:
    wait_until(lambda: standing_by(group))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        buffer = torch.ones(100_000)
        assert group.share_buffer(buffer)
        del buffer
    # Descriptors that other tests dropped may be closed in the meantime.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_buckets_over_a_plain_group_stay_private() -> None:
    trainer: Any = Trainer(ProcessGroupDummy(0, 1))
    model = nn.Linear(300, 300)
    wrapped = DistributedDataParallel(trainer, model)
    wrapped(torch.ones(2, 300)).sum().backward()
    assert model.weight.grad is not None and not model.weight.grad.is_shared()
