"""Whether a transport may write into a healing group's tensors, and a source that cannot serve."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable
from unittest.mock import MagicMock

import pytest

from tests.unit.manager.quorums import healing, peer_state
from torchft.checkpointing.transport import Unsendable

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture

Quorum = Callable[..., Any]


def heal(fixture: Fixture, quorum: Any, step: int, asynchronous: bool, **settings: Any) -> Any:
    """Returns the transport's target when a group at this step heals."""
    fixture.transport.takes_target = True
    manager = fixture.manager(use_async_quorum=asynchronous, **settings)
    manager.load_state_dict({"step": step, "batches_committed": 2 * step})
    fixture.client._quorum.return_value = quorum
    receive = fixture.transport.recv_checkpoint = MagicMock(return_value=peer_state(step=quorum.max_step))
    manager.start_quorum()
    assert manager.should_commit()
    return receive.call_args.kwargs["target"]


@pytest.mark.parametrize(
    ("step", "max_step", "up_to_date", "asynchronous", "writable"),
    [
        (3, 20, 2, False, True),  # there is another source if this one fails
        (3, 20, 1, False, False),  # its own weights may be the only copy
        (0, 20, 1, False, True),  # its own weights are not needed: the job is ahead of them
        (0, 0, 1, False, False),  # at the beginning of a job these weights may be needed
        (3, 20, 2, True, False),  # the training thread may read them
        (0, 20, 2, True, False),
    ],
)
def test_when_the_state_may_be_received_in_place(
    fixture: Fixture,
    make_quorum: Quorum,
    step: int,
    max_step: int,
    up_to_date: int,
    asynchronous: bool,
    writable: bool,
) -> None:
    quorum = healing(make_quorum, step=max_step)
    quorum.max_world_size = up_to_date
    assert heal(fixture, quorum, step, asynchronous).writable == writable


def test_a_target_has_the_structure_of_the_served_state(fixture: Fixture, make_quorum: Quorum) -> None:
    target = heal(fixture, healing(make_quorum), 0, False, state_dict=lambda: {"w": 1})
    assert target._read() == {"user": {"default": {"w": 1}}}


def test_a_failed_transfer_in_place_leaves_weights_of_no_step(fixture: Fixture, make_quorum: Quorum) -> None:
    """Some of the weights may be the peer's: the group commits nothing until it has healed."""
    fixture.transport.takes_target = True
    manager = fixture.manager(use_async_quorum=False)
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint = MagicMock(side_effect=RuntimeError("source failed"))
    manager.start_quorum()
    assert not manager.should_commit()
    fixture.client._quorum.return_value = make_quorum(quorum_id=2)  # there is no source in this quorum
    with pytest.raises(RuntimeError, match=r"weights are of no step.*no group to heal from"):
        manager.start_quorum()


def test_the_training_thread_settles_the_received_state(fixture: Fixture, make_quorum: Quorum) -> None:
    fixture.transport.takes_target = True
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)

    def receive(target: Any, **_: Any) -> Any:
        target.settle = lambda state, timeout: (fixture.loaded.append("settled"), state)[1]
        return peer_state()

    fixture.transport.recv_checkpoint = receive
    manager.start_quorum()
    manager.wait_quorum()
    assert fixture.loaded == []
    assert manager.should_commit()
    assert fixture.loaded == ["settled", "weights"]


def test_a_state_that_cannot_be_sent_costs_the_source_nothing(fixture: Fixture, make_quorum: Quorum) -> None:
    """The target gets the reason. The source keeps its state and continues."""
    manager = fixture.manager()
    fixture.client._quorum.return_value = make_quorum(max_step=0, recover_dst_replica_ranks=[0])
    fixture.transport.send_checkpoint.side_effect = Unsendable("['w'] is on the meta device")
    for _ in range(2):
        manager.start_quorum()
        assert manager.should_commit()


def test_a_state_that_cannot_be_read_is_refused_to_its_targets(fixture: Fixture, make_quorum: Quorum) -> None:
    def fail() -> Any:
        raise ValueError("no weights")

    manager = fixture.manager(state_dict=fail)
    fixture.client._quorum.return_value = make_quorum(max_step=0, recover_dst_replica_ranks=[0])
    manager.start_quorum()
    assert manager.should_commit()
    fixture.transport.send_checkpoint.assert_not_called()
    fixture.transport.refuse_checkpoint.assert_called_once_with(
        reason="its state_dict function failed: ValueError('no weights')",
        dst_ranks=[0],
        step=0,
        timeout=timedelta(seconds=10),
    )
