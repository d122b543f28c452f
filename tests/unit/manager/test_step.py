"""A step: which vote it leads to, and how it ends."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Callable
from unittest.mock import MagicMock

import pytest
import torch

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.quorums import healing, peer_state
from tests.unit.manager.test_plan import plan, result
from torchft._manager.observe.trace import StepTrace
from torchft._manager.step.step import Step, StepOutcome, StepRequest
from torchft._torchft import QuorumResult

Quorum = Callable[..., QuorumResult]


def begun(**quorum: Any) -> Step:
    step = Step(StepRequest(True, False, timedelta(seconds=1)), MagicMock(), [], None)
    step.follow(plan(result(**quorum)))
    return step


def test_the_first_error_is_the_cause_and_the_vote_is_no() -> None:
    step = begun(heal=False, max_replica_rank=1)
    step.failed(RuntimeError("first"))
    step.failed(RuntimeError("second"))
    assert step.vote(least=1) is False and step.why_lost() == "first"
    step.decided(committed=False)
    assert step.outcome is StepOutcome.LOST and not step.undecided


def test_why_a_step_without_an_error_is_lost() -> None:
    step = begun(heal=False, max_replica_rank=1)
    assert step.vote(least=2) is True
    step.decided(committed=False)
    assert step.why_lost() == "another rank of the group voted against it"
    assert step.vote(least=3) is False
    assert step.why_lost() == "too few groups took part"


def test_a_group_that_healed_before_the_step_contributes() -> None:
    step = begun()
    assert step.healing
    step.loaded()
    assert step.healing, "its gradients are of the old weights"
    step.joined()
    assert not step.healing and step.vote(least=1)


def fail(step: Step) -> None:
    step.failed(RuntimeError("a collective failed"))


@pytest.mark.parametrize(
    ("events", "yes"),
    [
        ([], False),
        ([Step.loaded], True),
        ([Step.loaded, Step.joined], True),
        ([Step.loaded, fail], False),
        ([fail, Step.loaded, Step.joined], False),
    ],
)
def test_the_vote_of_a_group_that_heals(events: list[Callable[[Step], None]], yes: bool) -> None:
    """Never yes before a peer's state is loaded, or after an error; a state is loaded nevertheless."""
    step = begun()
    for event in events:
        event(step)
    assert step.vote(least=1) is yes


def test_an_error_before_the_quorum_is_known_counts() -> None:
    step = Step(StepRequest(True, False, timedelta(seconds=1)), MagicMock(), [], None)
    fail(step)
    step.follow(plan(result(heal=False, max_replica_rank=1)))
    assert step.vote(least=1) is False


def test_an_error_ends_collectives_unless_the_step_has_ended_for_this_rank() -> None:
    """After this rank's vote the next step may keep the connection."""
    aborts = []
    for end in (lambda step: None, lambda step: step.vote(least=1), Step.dropped):
        step = begun(heal=False, max_replica_rank=1)
        step.connected()
        end(step)
        fail(step)
        step.abort()
        aborts.append(step.collectives.abort.called)  # type: ignore[attr-defined]
    assert aborts == [True, False, False]


def test_after_a_decision_the_vote_is_on_the_next_step() -> None:
    step = begun(heal=False, max_replica_rank=1)
    assert step.vote(least=1) and step.undecided
    step.decided(committed=True)
    assert step.committed and not step.undecided
    assert step.vote(least=1) and step.undecided and not step.committed
    step.decided(committed=False)
    assert step.outcome is StepOutcome.LOST


# Steps of a Manager


def test_a_step_ends_when_the_next_one_begins(fixture: Fixture) -> None:
    manager = fixture.manager()
    assert not manager._current.undecided
    manager.start_quorum()
    first = manager._current
    manager.allreduce(torch.ones(2)).wait()
    assert manager.should_commit() and first.committed
    manager.report_error(RuntimeError("after the vote"))
    assert manager._current is first and manager.errored() is first.error
    manager.start_quorum()
    assert manager._current is not first and manager.errored() is None


def test_asked_twice(fixture: Fixture, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    fixture.client._quorum.return_value = healing(make_quorum)
    fixture.transport.recv_checkpoint.return_value = peer_state()
    manager.start_quorum()
    first = manager._current
    manager.wait_quorum()
    manager.start_quorum()
    assert first.outcome is StepOutcome.DROPPED and manager._current.undecided
    assert manager.should_commit() and fixture.loaded == ["weights"]


def test_voted_twice(fixture: Fixture) -> None:
    """As in upstream: the second vote is on the next step."""
    manager = fixture.manager()
    manager.start_quorum()
    assert manager.should_commit() and manager.should_commit()
    assert manager.current_step() == 2
    assert [call.args[1] for call in fixture.client.should_commit.call_args_list] == [0, 1]


def test_an_unanswered_vote_may_be_repeated(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    fixture.client.should_commit.side_effect = [TimeoutError("a rank did not vote"), True]
    with pytest.raises(TimeoutError):
        manager.should_commit()
    assert manager._current.undecided
    assert manager.should_commit() and manager.current_step() == 1


def test_an_error_after_the_vote_counts_when_it_is_asked_again() -> None:
    step = begun(heal=False, max_replica_rank=1)
    assert step.vote(least=1) is True
    step.failed(RuntimeError("late"))
    assert step.vote(least=1) is False


def test_a_stand_ins_commit_against_this_ranks_vote_counts(fixture: Fixture) -> None:
    manager = fixture.manager()
    fixture.client.should_commit.side_effect = [True]
    manager.start_quorum()
    manager.report_error(RuntimeError("bad batch"))
    assert manager.should_commit() and manager.current_step() == 1


def test_a_replay_without_a_quorum_leaves_no_step_open(fixture: Fixture, make_quorum: Quorum) -> None:
    """A draining group may leave after such a step."""
    manager = fixture.manager(replay_failed_step=True)
    fixture.client._quorum.side_effect = [make_quorum(replay=True, draining=True), TimeoutError("no quorum")]
    manager.start_quorum()
    manager.allreduce(torch.ones(2)).wait()
    manager._errors.of_collective(RuntimeError("a peer failed"))
    assert not manager.should_commit()
    assert manager._current.outcome is StepOutcome.DROPPED and manager.draining()


def test_each_attempt_has_a_trace_with_its_outcome(fixture: Fixture, make_quorum: Quorum) -> None:
    spans: list[MagicMock] = []

    def start(name: str, attributes: dict[str, Any]) -> MagicMock:
        context = SimpleNamespace(trace_id=1, span_id=len(spans), trace_flags=1)
        spans.append(MagicMock(**{"get_span_context.return_value": context}))
        return spans[-1]

    manager = fixture.manager(replay_failed_step=True)
    manager._trace = StepTrace(SimpleNamespace(start_span=start), "g", 0)
    fixture.client._quorum.side_effect = [make_quorum(replay=True, quorum_id=i) for i in (1, 2, 3)]
    manager.start_quorum()
    manager.start_quorum()
    manager.allreduce(torch.ones(2)).wait()
    manager._errors.of_collective(error := RuntimeError("a peer failed"))
    assert manager.should_commit()
    attributes = [dict(call.args for call in span.set_attribute.call_args_list) for span in spans]
    assert [(of["torchft.quorum_id"], of["torchft.committed"]) for of in attributes[1:]] == [
        (2, False),
        (3, True),
    ]
    assert [span.end.call_count for span in spans] == [1, 1, 1]
    spans[1].record_exception.assert_called_once_with(error)
    assert not spans[0].record_exception.called and not spans[2].record_exception.called
