"""A heal and the training thread on one device: the order of their work, and the current device of each."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.late.one_rank import OneRank
from tests.late.test_step import DEADLINE, Vote
from tests.promises import ABORT_S, within
from tests.unit.manager.conftest import Fixture, fixture, quorum
from torchft._handoff import drain
from torchft._manager.step.step import Step, StepRequest
from torchft._torchft import MemberFailure
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


def test_a_served_state_is_ordered_behind_the_trainings_queued_work(
    fixture: Fixture, late: ModuleType
) -> None:
    """The last step's optimizer may still run when the next quorum names a healing group."""
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
def test_a_heal_has_arrived_when_it_is_loaded(
    fixture: Fixture, late: ModuleType, use_async_quorum: bool
) -> None:
    """When the transport returns, the receive is only queued."""
    loaded = []

    def receive(**asked: Any) -> dict[str, Any]:
        state = torch.zeros(4, device="late")
        late.enqueue(lambda: time.sleep(0.1))
        state.fill_(7)
        return {"user": {"default": state}, "torchft": {"step": 20, "batches_committed": 40}}

    fixture.transport.recv_checkpoint.side_effect = receive
    fixture.client._quorum.return_value = healing()
    manager = fixture.manager(
        load_state_dict=lambda state: loaded.append(state + 0), use_async_quorum=use_async_quorum
    )
    manager.start_quorum()
    if use_async_quorum:
        assert manager.should_commit()
    assert loaded[0].tolist() == [7, 7, 7, 7]


def test_a_healed_tensor_is_not_used_again_while_the_training_reads_it(
    fixture: Fixture, late: ModuleType
) -> None:
    """It was allocated on the heal's stream, whose next allocation would reuse its memory at once."""
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


# A transfer that hangs


@pytest.fixture
def hanging(late: ModuleType) -> Iterator[OneRank]:
    """A native group, whose operations have no deadline of torchft's."""
    group = OneRank()
    group.hang()
    yield group
    group.peer_comes()


def sending(fixture: Fixture, group: OneRank, **given: Any) -> Manager:
    """A group that serves its state by sends to a peer, which are queued behind that peer's receives."""
    fixture.client._quorum.return_value = serving(reconfigure_handles=["late", "late of another"])
    state = torch.ones(4, device="late")
    fixture.transport.send_checkpoint.side_effect = lambda **sent: group.allreduce([state]).wait()
    manager = fixture.manager(pg=group, **given)
    manager.start_quorum()
    manager.wait_quorum()
    return manager


@pytest.mark.slow
def test_a_transfer_that_hangs_costs_the_step_at_the_deadline(fixture: Fixture, hanging: OneRank) -> None:
    manager = sending(fixture, hanging, timeout=DEADLINE)
    vote = Vote(manager)
    assert not vote.answer() and fixture.votes() == [False]
    assert time.monotonic() - vote.began < within(DEADLINE.total_seconds() + ABORT_S)
    assert hanging.aborts == 1
    assert "transfer of a state within 2.0 s" in str(manager.errored())


@pytest.mark.parametrize("while_voting", [False, True])
def test_a_reported_failure_ends_a_transfer(fixture: Fixture, hanging: OneRank, while_voting: bool) -> None:
    """No collective runs: the target failed before this group reached its first one."""
    manager = sending(fixture, hanging)
    assert manager._failures.progress() == (True, "waits for its device to send or receive a state", "")
    vote = Vote(manager) if while_voting else None
    manager._failures.member_failed(MemberFailure(1, "group_0:uuid", "its connection broke"))
    assert hanging.aborts == 1
    began = time.monotonic()
    assert not (vote or Vote(manager)).answer()
    assert time.monotonic() - began < within(ABORT_S)
    assert "group_0:uuid of quorum 1 failed" in str(manager.errored())


def test_a_failure_after_a_transfer_has_ended_costs_nothing(fixture: Fixture, hanging: OneRank) -> None:
    manager = sending(fixture, hanging)
    hanging.peer_comes()
    torch.accelerator.synchronize()
    manager._failures.member_failed(MemberFailure(1, "group_0:uuid", "its connection broke"))
    assert hanging.aborts == 0
    assert manager.should_commit()


def test_a_state_that_does_not_arrive_is_not_loaded(fixture: Fixture, hanging: OneRank) -> None:
    def receive(**asked: Any) -> dict[str, Any]:
        state = torch.zeros(4, device="late")
        hanging.allreduce([state]).wait()
        return {"user": {"default": state}, "torchft": {"step": 20, "batches_committed": 40}}

    fixture.transport.recv_checkpoint.side_effect = receive
    fixture.client._quorum.return_value = healing()
    loaded: list[Any] = []
    manager = fixture.manager(load_state_dict=loaded.append, timeout=DEADLINE)
    manager.start_quorum()
    vote = Vote(manager)
    assert not vote.answer()
    assert loaded == [] and manager.current_step() == 0


@pytest.fixture
def set_on(late: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that have set a current device."""
    threads: list[threading.Thread] = []
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda _: threads.append(threading.current_thread())
    )
    return threads


def test_a_synchronous_quorum_does_not_change_the_training_threads_device(
    fixture: Fixture, set_on: list[threading.Thread], late: ModuleType
) -> None:
    torch.ones(1, device="late")
    manager = fixture.manager()
    manager._background.begin()
    request = StepRequest(True, False, timedelta(seconds=10))
    manager._follow(Step(request, manager._new_collectives(), [], None), quorum())
    assert threading.current_thread() not in set_on


def test_the_device_is_that_of_the_step_not_that_of_the_constructor(
    fixture: Fixture, set_on: list[threading.Thread], late: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that no group of an earlier test ends in this block, and asks for a device.
    gc.collect()
    assert drain(10)
    set_on.clear()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "Stream", None)
        patched.setattr(torch.accelerator, "current_device_index", None)
        patched.setattr(torch.accelerator, "current_stream", None)
        manager: Manager = fixture.manager()
    torch.ones(1, device="late")
    manager.start_quorum()
    manager.wait_quorum()
    assert [thread.name for thread in set_on] == ["torchft_quorum"]


def test_a_state_that_is_being_sent_may_be_changed_after_finish_serving(
    fixture: Fixture, late: ModuleType
) -> None:
    """Streaming DiLoCo continues within the step. The sends were only queued when the transport returned."""
    fixture.client._quorum.return_value = serving()
    state, sent = torch.ones(4, device="late"), torch.zeros(4, device="late")
    streams: list[torch.Stream] = []

    def send(**given: Any) -> None:
        streams.append(torch.accelerator.current_stream())
        late.hold(streams[0])
        sent.copy_(state)

    fixture.transport.send_checkpoint.side_effect = send
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    finishing = threading.Thread(target=lambda: (manager.finish_serving(), state.fill_(7)))
    finishing.start()
    try:
        finishing.join(0.3)
        assert finishing.is_alive(), "the device has not sent it yet"
    finally:
        late.release(streams[0])
        finishing.join(20)
    torch.accelerator.synchronize()
    assert sent.tolist() == [1, 1, 1, 1]


@pytest.mark.slow
def test_a_state_that_is_not_sent_in_time_costs_the_step(fixture: Fixture, hanging: OneRank) -> None:
    manager = sending(fixture, hanging, timeout=DEADLINE)
    began = time.monotonic()
    manager.finish_serving()
    assert time.monotonic() - began < within(DEADLINE.total_seconds() + ABORT_S)
    assert hanging.aborts == 1
    assert "transfer of a state within 2.0 s" in str(manager.errored())
