"""A torchcomms communicator on a device, replaced by the stand-in of tests/unit: its `wait` orders
the current stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from tests.late.observed import until
from tests.late.one_rank import OneRank
from tests.late.test_step import Vote
from tests.unit.manager.conftest import Fixture, fixture, quorum
from tests.unit.process_group.test_torchcomms import Comm, module
from torchft.futures import _TIMEOUT_MANAGER
from torchft.process_group.reconfigure import ReconfigureOptions

__all__ = ["fixture", "module"]


class DeviceComm(Comm):
    def __init__(self, backend: OneRank) -> None:
        super().__init__("late")
        self.backend = backend

    def get_device(self) -> torch.device:
        return torch.device("late", 0)

    def all_reduce(self, t: torch.Tensor, op: str, async_op: bool) -> Any:
        assert async_op
        return self.backend.allreduce([t])

    def abort(self) -> None:
        self.backend.abort()


@pytest.fixture
def backend(late: ModuleType) -> Iterator[OneRank]:
    backend = OneRank()
    yield backend
    backend.peer_comes()


@pytest.fixture
def group(module: Any, backend: OneRank) -> Any:
    made = module.ProcessGroupTorchComms(DeviceComm(backend), timedelta(seconds=0.2))
    new_peers(made, 1)
    return made


def new_peers(group: Any, uuid: int) -> None:
    opts = ReconfigureOptions()
    opts.handles, opts.uuid = [group.get_reconfigure_handle()], uuid
    group.reconfigure(opts)


def by_wait(group: Any, tensor: torch.Tensor) -> None:
    assert group.allreduce([tensor], ReduceOp.SUM).wait()


def by_future(group: Any, tensor: torch.Tensor) -> None:
    group.allreduce([tensor], ReduceOp.SUM).get_future().wait()


@pytest.mark.parametrize("ask", [by_wait, by_future])
def test_an_operation_that_hangs_on_the_device_has_a_deadline(
    group: Any, backend: OneRank, ask: Callable[[Any, torch.Tensor], None]
) -> None:
    """The host is not blocked, because its wait has only been queued."""
    tensor = torch.ones(2, device="late")
    ask(group, tensor)
    torch.accelerator.synchronize()
    assert tensor.tolist() == [2, 2]
    backend.hang()
    ask(group, tensor)
    assert group.errored() is None
    until(lambda: group.errored() is not None)
    assert "was aborted" in str(group.errored()) and backend.aborts == 1


def test_it_is_in_flight_until_the_device_has_finished(group: Any, backend: OneRank) -> None:
    """After an abort, `is_completed` shows whether an operation may still write to its tensors."""
    backend.hang()
    work = group.allreduce([torch.ones(2, device="late")], ReduceOp.SUM)
    assert work.wait() and not work.is_completed()
    backend.peer_comes()
    until(work.is_completed)


def test_the_vote_comes_after_the_device(fixture: Fixture, module: Any, backend: OneRank) -> None:
    group = module.ProcessGroupTorchComms(DeviceComm(backend), timedelta(seconds=20))
    fixture.client._quorum.return_value = quorum(reconfigure_handles=[group.get_reconfigure_handle()])
    manager = fixture.manager(pg=group)
    manager.start_quorum()
    manager.wait_quorum()
    backend.hang()
    tensor = torch.ones(2, device="late")
    assert manager.allreduce(tensor).wait()
    vote = Vote(manager)
    time.sleep(0.05)
    assert fixture.votes() == []
    backend.peer_comes()
    assert vote.answer()
    assert tensor.tolist() == [1, 1]


def test_a_deadline_of_the_old_peers_does_not_affect_the_new_peers(group: Any, backend: OneRank) -> None:
    backend.hang()
    by_wait(group, torch.ones(2, device="late"))
    new_peers(group, 2)
    struck: list[bool] = []
    # The timers run one after another, in the order of their deadlines.
    _TIMEOUT_MANAGER.schedule(timedelta(seconds=0.3), lambda: struck.append(group.errored() is not None))
    until(lambda: bool(struck))
    assert struck == [False] and backend.aborts == 0
