"""A Manager whose group heals, or is the source of a heal."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.unit.manager.quorums import Quorum, healing, manager_state, peer_state
from torchft._torchft import MemberFailure, QuorumRequest
from torchft.work import _DummyWork

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture


def test_source_serves_its_state(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    fixture.client._quorum.return_value = make_quorum(max_step=0, recover_dst_replica_ranks=[0])
    manager.start_quorum()
    assert manager.should_commit()
    fixture.transport.send_checkpoint.assert_called_once_with(
        dst_ranks=[0],
        step=0,
        state_dict={"user": {"default": {"weights": 1}}, "torchft": {"step": 0, "batches_committed": 0}},
        timeout=timedelta(seconds=10),
    )


def test_async_heal(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager.start_quorum()
    tensor = torch.ones(2)
    manager.allreduce(tensor).wait()
    assert tensor.tolist() == [0.0, 0.0] and not manager.is_participating()
    manager.wait_quorum()
    # The model belongs to the training thread, which loads at the end of the step.
    assert fixture.loaded == []
    assert manager.should_commit()
    assert fixture.loaded == ["weights"]
    assert manager.state_dict() == {"step": 21, "batches_committed": 41}
    fixture.client_class.assert_called_with("http://source:1", connect_timeout=timedelta(seconds=60))
    fixture.client._checkpoint_metadata.assert_called_once_with(1, timeout=timedelta(seconds=10))
    fixture.transport.recv_checkpoint.assert_called_once_with(
        src_rank=0, metadata="where", step=20, timeout=timedelta(seconds=10)
    )


@pytest.mark.parametrize("then", ["fails", "hangs", "is not there"])
def test_a_source_that_is_not_reached(fixture: Fixture, make_quorum: Quorum, then: str) -> None:
    """The other groups cannot continue before this group requests the next quorum: a source that is reported
    to have failed is not waited for.
    """
    limit = timedelta(seconds=60 if then == "fails" else 0.2)
    manager = fixture.manager(connect_timeout=limit)
    fixture.client._quorum.return_value = healing(make_quorum)
    ended = threading.Event()

    def connect(address: str, connect_timeout: timedelta) -> Any:
        assert connect_timeout == limit
        if then == "fails":
            manager._failures.member_failed(MemberFailure(1, "group_0:uuid", "its connection broke"))
        if then != "is not there":
            assert ended.wait(30)
        raise RuntimeError("could not connect")

    fixture.client_class.side_effect = connect
    manager.start_quorum()
    assert not manager.should_commit()
    ended.set()
    reasons = {
        "fails": "group_0:uuid of quorum 1 failed",
        "hangs": "timed out: there was no answer within 0:00:00.2",
        "is not there": "could not connect",
    }
    assert reasons[then] in str(manager.errored())


def test_a_source_that_fails_during_the_transfer_is_not_waited_for(
    fixture: Fixture, make_quorum: Quorum
) -> None:
    """The source may be stopped, with its connections open."""
    abandoned = threading.Event()
    fixture.transport.abandon_receiving = lambda reason: abandoned.set()
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)
    begun = threading.Event()

    def receive(**asked: Any) -> Any:
        begun.set()
        assert abandoned.wait(30)
        raise RuntimeError("abandoned")

    fixture.transport.recv_checkpoint.side_effect = receive
    manager.start_quorum()
    assert begun.wait(30)
    manager._failures.member_failed(MemberFailure(1, "group_1:uuid", "another one"))
    assert not abandoned.is_set()
    manager._failures.member_failed(MemberFailure(1, "group_0:uuid", "no sign of life"))
    assert not manager.should_commit()
    assert abandoned.is_set() and "abandoned" in str(manager.errored())


def test_heal_from_several_sources(fixture: Fixture, make_quorum: Quorum) -> None:
    fixture.transport.several_sources = True
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(
        make_quorum, additional_source_addresses=["http://b:1", "http://c:1"]
    )
    fixture.transport.recv_checkpoint = MagicMock(return_value=peer_state())
    manager.start_quorum()
    assert manager.should_commit()
    fixture.client_class.assert_called_with("http://source:1", connect_timeout=timedelta(seconds=60))
    additional_sources = fixture.transport.recv_checkpoint.call_args.kwargs["additional_sources"]
    # The transport asks an additional source only when it needs it, with a short timeout.
    for additional, address in zip(additional_sources, ["http://b:1", "http://c:1"]):
        assert additional() == "where"
        fixture.client_class.assert_called_with(address, connect_timeout=timedelta(seconds=3))
        fixture.client._checkpoint_metadata.assert_called_with(1, timeout=timedelta(seconds=3))


def test_an_up_to_date_group_helps_targets_of_others(fixture: Fixture, make_quorum: Quorum) -> None:
    fixture.transport.several_sources = True
    manager = fixture.manager()
    fixture.client._quorum.return_value = make_quorum(help_dst_replica_ranks=[0])
    manager.start_quorum()
    assert manager.should_commit()
    fixture.transport.help_checkpoint.assert_called_once_with(0, manager_state(step=0, batches=0))
    fixture.transport.send_checkpoint.assert_not_called()


def test_a_source_that_helps_as_well_offers_its_state_once(fixture: Fixture, make_quorum: Quorum) -> None:
    fixture.transport.several_sources = True
    manager = fixture.manager()
    fixture.client._quorum.return_value = make_quorum(
        recover_dst_replica_ranks=[0], help_dst_replica_ranks=[2]
    )
    manager.start_quorum()
    assert manager.should_commit()
    fixture.transport.send_checkpoint.assert_called_once()
    fixture.transport.help_checkpoint.assert_not_called()


def test_a_failed_additional_source_costs_nothing(fixture: Fixture, make_quorum: Quorum) -> None:
    fixture.transport.several_sources = True
    fixture.transport.help_checkpoint.side_effect = RuntimeError("no memory")
    manager = fixture.manager()
    fixture.client._quorum.return_value = make_quorum(help_dst_replica_ranks=[0])
    manager.start_quorum()
    assert manager.should_commit() and manager.errored() is None


@pytest.mark.parametrize("why", ["the transport", "TORCHFT_HEAL_SOURCES"])
def test_one_source_only(
    fixture: Fixture, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "the transport":
        fixture.transport.several_sources = False
    else:
        fixture.transport.several_sources = True
        monkeypatch.setenv("TORCHFT_HEAL_SOURCES", "1")
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum, additional_source_addresses=["http://b:1"])
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager.start_quorum()
    assert manager.should_commit()
    assert "additional_sources" not in fixture.transport.recv_checkpoint.call_args.kwargs
    fixture.client._quorum.return_value = make_quorum(help_dst_replica_ranks=[0], quorum_id=2)
    manager.start_quorum()
    assert manager.should_commit()
    fixture.transport.help_checkpoint.assert_not_called()


@pytest.mark.parametrize("value", ["0", "5", "many"])
def test_number_of_sources_is_checked(fixture: Fixture, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TORCHFT_HEAL_SOURCES", value)
    with pytest.raises(ValueError, match=f"TORCHFT_HEAL_SOURCES='?{value}'?"):
        fixture.manager()


@pytest.mark.parametrize("where", ["transfer", "never loaded"])
def test_an_unfinished_heal_in_place_leaves_weights_of_no_step(
    fixture: Fixture, make_quorum: Quorum, where: str
) -> None:
    """Some of the weights may be the peer's: the group commits nothing until it has healed."""
    fixture.transport.in_place = True
    load = MagicMock(side_effect=[None] if where == "transfer" else [ValueError("no"), None])
    manager = fixture.manager(use_async_quorum=False, load_state_dict=load)
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.side_effect = (
        [RuntimeError("source failed")] if where == "transfer" else None
    )
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager.start_quorum()
    assert not manager.should_commit()
    fixture.client._quorum.return_value = make_quorum(quorum_id=2)  # there is no source in this quorum
    with pytest.raises(RuntimeError, match=r"weights are of no step.*no group to heal from"):
        manager.start_quorum()
    fixture.client._quorum.return_value = healing(make_quorum, quorum_id=3)
    fixture.transport.recv_checkpoint.side_effect = None
    manager.start_quorum()
    assert manager.should_commit() and manager.current_step() == 21
    fixture.client._quorum.return_value = make_quorum(quorum_id=4, max_step=21)
    manager.start_quorum()
    assert manager.should_commit()


def test_a_transfer_in_place_excludes_an_asynchronous_quorum(fixture: Fixture) -> None:
    fixture.transport.in_place = True
    with pytest.warns(UserWarning, match="use_async_quorum=False"):
        fixture.manager(use_async_quorum=True)


def test_sync_heal_takes_part_at_once(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager(use_async_quorum=False)
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager.start_quorum()
    assert fixture.loaded == ["weights"] and manager.is_participating()
    tensor = torch.ones(2)
    manager.allreduce(tensor).wait()
    assert tensor.tolist() == [0.5, 0.5]
    assert manager.should_commit() and manager.current_step() == 21


def test_heal_not_allowed(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)
    manager.start_quorum(allow_heal=False)
    assert manager.should_commit()
    fixture.transport.recv_checkpoint.assert_not_called()


def test_peers_meet_a_healing_group_after_its_heal(fixture: Fixture, make_quorum: Quorum) -> None:
    """The first allreduce waits for the transfer, so that the transfer ends before the source's weights
    change.
    """
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)
    order: list[str] = []
    fixture.transport.recv_checkpoint.side_effect = lambda **_: (order.append("heal"), peer_state())[1]
    allreduce = fixture.pg.allreduce
    fixture.pg.allreduce = lambda *args: (order.append("allreduce"), allreduce(*args))[1]  # type: ignore[method-assign]
    manager.start_quorum()
    assert manager.allreduce(torch.ones(1)).wait()
    assert order == ["heal", "allreduce"]


@pytest.mark.parametrize("use_async_quorum", [True, False])
@pytest.mark.parametrize("where", ["transfer", "load", "metadata", "wrong step", "missing part"])
def test_a_failed_heal_does_not_block_its_peers(
    fixture: Fixture, make_quorum: Quorum, where: str, use_async_quorum: bool
) -> None:
    load = MagicMock(side_effect=ValueError("shape mismatch") if where == "load" else None)
    manager = fixture.manager(load_state_dict=load, use_async_quorum=use_async_quorum)
    manager.load_state_dict({"step": 3, "batches_committed": 6})
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.return_value = peer_state(
        step=19 if where == "wrong step" else 20, user={} if where == "missing part" else None
    )
    if where == "transfer":
        fixture.transport.recv_checkpoint.side_effect = RuntimeError("source failed")
    if where == "metadata":
        fixture.client._checkpoint_metadata.side_effect = RuntimeError("source failed")

    manager.start_quorum()
    tensor = torch.ones(2)
    work = manager.allreduce(tensor)
    assert not isinstance(work, _DummyWork) and work.wait()  # the peers count on this group's zeros
    assert tensor.tolist() == [0.0, 0.0]
    assert not manager.should_commit() and fixture.votes() == [False]
    assert manager.errored() is not None
    # It still has the weights of step 3 and reports that step, so it heals in the next quorum.
    assert manager.state_dict() == {"step": 3, "batches_committed": 6}


def test_heal_that_times_out_is_a_timeout_and_a_runtime_error(fixture: Fixture, make_quorum: Quorum) -> None:
    """With any transport, the error is a TimeoutError and a RuntimeError."""
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.side_effect = TimeoutError("too slow")
    manager.start_quorum()
    manager.wait_quorum()
    kept = manager.errored()
    assert kept is not None
    error = kept.original_exception
    assert isinstance(error, TimeoutError) and isinstance(error, RuntimeError)
    assert str(error) == "healing from http://source:1 timed out: too slow"


def test_heal_that_was_never_loaded_is_forgotten(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager.start_quorum()
    manager.wait_quorum()  # the forward pass raises an error, and the script retries
    manager.start_quorum()
    manager.wait_quorum()
    assert [call.kwargs["step"] for call in fixture.client._quorum.call_args_list] == [0, 0]


def test_the_request_names_the_quorum_of_the_weights(
    fixture: Fixture, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    result = make_quorum(quorum_id=7)

    fixture.client._quorum.side_effect = lambda **_: result
    manager = fixture.manager()
    assert manager._rounds is not None
    begin = manager._rounds.begin

    def note(follow: Any, request: QuorumRequest, timeout: timedelta) -> Any:
        sent.append(request.committed_quorum_id)
        return begin(follow, request, timeout)

    monkeypatch.setattr(manager._rounds, "begin", note)

    def step() -> bool:
        manager.start_quorum()
        return manager.should_commit()

    assert step() and step()
    assert sent == [-1, 7]  # none yet, then the first quorum's
    manager.start_quorum()
    manager.report_error(RuntimeError("not committed"))
    assert not manager.should_commit()

    result = healing(make_quorum, committed_quorum_id=30)  # the source's weights were committed in quorum 30
    fixture.transport.recv_checkpoint.side_effect = RuntimeError("source failed")
    assert not step()
    fixture.transport.recv_checkpoint.side_effect = None
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager.start_quorum()
    manager.wait_quorum()  # fetched, but never loaded
    manager.start_quorum()
    manager.report_error(RuntimeError("not committed"))
    assert not manager.should_commit()  # the heal was loaded nevertheless
    result = make_quorum(quorum_id=40)
    assert step() and step()
    assert sent == [-1, 7, 7, 7, 7, 7, 30, 40]

    manager.load_state_dict({"step": 3, "batches_committed": 6})
    assert step()
    assert sent[-1] == -1, "weights of a checkpoint"


def test_state_dict_functions_may_come_later(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager(load_state_dict=None, state_dict=None)
    extra: list[Any] = []
    manager.set_state_dict_fns(fixture.loaded.append, lambda: "main")
    manager.register_state_dict_fn("extra", extra.append, lambda: "more")
    assert manager._manager_state_dict()["user"] == {"default": "main", "extra": "more"}
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.return_value = peer_state(user={"default": 1, "extra": 2})
    manager.start_quorum()
    assert manager.should_commit()
    assert fixture.loaded == [1] and extra == [2]
