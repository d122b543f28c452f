"""A heal and the training thread on one device: their order, and whose device it is."""

from __future__ import annotations

import threading
import time
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.unit.manager.conftest import Fixture, fixture, quorum
from torchft.manager import Manager

__all__ = ["fixture"]


def serving(**fields: Any) -> Any:
    return quorum(recover_dst_replica_ranks=[0], max_replica_rank=1, **fields)


def healing() -> Any:
    return quorum(
        max_step=20,
        heal=True,
        max_replica_rank=None,
        max_world_size=1,
        recover_src_replica_rank=0,
        recover_src_manager_address="http://source:1",
    )


def test_what_is_served_comes_after_what_the_training_has_queued(fixture: Fixture, late: ModuleType) -> None:
    """The last step's optimizer may still run when the next quorum knows who heals."""
    weights, served = torch.zeros(4, device="late"), []
    fixture.client._quorum.return_value = serving()
    fixture.transport.send_checkpoint.side_effect = lambda **sent: served.append(
        sent["state_dict"]["user"]["default"].tolist()
    )
    manager = fixture.manager(state_dict=lambda: weights)
    late.enqueue(lambda: time.sleep(0.1))
    weights.add_(1)
    manager.start_quorum()
    manager.wait_quorum()
    assert served == [[1, 1, 1, 1]]


@pytest.mark.parametrize("use_async_quorum", [False, True])
def test_a_heal_has_arrived_when_it_is_loaded(fixture: Fixture, late: ModuleType, use_async_quorum: bool) -> None:
    """What brings it is only queued when the transport returns."""
    loaded = []

    def receive(**asked: Any) -> dict[str, Any]:
        state = torch.zeros(4, device="late")
        late.enqueue(lambda: time.sleep(0.1))
        state.fill_(7)
        return {"user": {"default": state}, "torchft": {"step": 20, "batches_committed": 40}}

    fixture.transport.recv_checkpoint.side_effect = receive
    fixture.client._quorum.return_value = healing()
    manager = fixture.manager(load_state_dict=lambda state: loaded.append(state + 0), use_async_quorum=use_async_quorum)
    manager.start_quorum()
    if use_async_quorum:
        assert manager.should_commit()
    assert loaded[0].tolist() == [7, 7, 7, 7]


def test_a_healed_tensor_is_not_used_again_while_the_training_reads_it(fixture: Fixture, late: ModuleType) -> None:
    """It was allocated on the stream of the heal, whose next allocation would get its memory at once."""
    loaded: list[torch.Tensor] = []
    streams: list[torch.Stream] = []

    def receive(**asked: Any) -> dict[str, Any]:
        streams.append(torch.accelerator.current_stream())
        state = torch.full((4,), 7.0, device="late")
        return {"user": {"default": state}, "torchft": {"step": 20, "batches_committed": 40}}

    fixture.transport.recv_checkpoint.side_effect = receive
    fixture.client._quorum.return_value = healing()
    manager = fixture.manager(load_state_dict=loaded.append, use_async_quorum=False)
    manager.start_quorum()
    training = torch.accelerator.current_stream()
    with late.held(training):
        read = loaded[0] + 0
        loaded.clear()
        with streams[0]:
            torch.zeros(4, device="late")
        streams[0].synchronize()
    assert read.tolist() == [7, 7, 7, 7]


@pytest.fixture
def set_on(late: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that set a current device."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: threads.append(threading.current_thread()))
    return threads


def test_a_quorum_that_the_training_thread_follows_leaves_its_device_alone(
    fixture: Fixture, set_on: list[threading.Thread], late: ModuleType
) -> None:
    torch.ones(1, device="late")
    manager = fixture.manager()
    manager._background.begin()
    manager._follow(True, quorum())
    assert threading.current_thread() not in set_on


def test_the_device_is_that_of_the_step_not_that_of_the_constructor(
    fixture: Fixture, set_on: list[threading.Thread], late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch, "Stream", None)
        patched.setattr(torch.accelerator, "current_device_index", None)
        patched.setattr(torch.accelerator, "current_stream", None)
        manager: Manager = fixture.manager()
    torch.ones(1, device="late")
    manager.start_quorum()
    manager.wait_quorum()
    assert [thread.name for thread in set_on] == ["torchft_quorum"]
