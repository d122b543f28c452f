"""The states of a step: the transition for each event, and the events that are errors."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Callable, Optional
from unittest.mock import MagicMock

import pytest
import torch

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.contended import Contended
from tests.unit.manager.quorums import healing, peer_state
from tests.unit.manager.test_plan import plan, result
from torchft._manager.observe.trace import StepTrace
from torchft._manager.step.step import TRANSITIONS, Event, Step, StepRequest, StepState, after
from torchft._torchft import QuorumResult

Quorum = Callable[..., QuorumResult]
Path = list[tuple[Event, Optional[StepState]]]  # None: the event is an error

PATHS: dict[str, Path] = {
    "a step": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.YES, StepState.VOTED_YES),
        (Event.COMMIT, StepState.COMMITTED),
        (Event.DROP, None),
    ],
    "a sibling votes against it": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.YES, StepState.VOTED_YES),
        (Event.LOSE, StepState.LOST),
        (Event.DROP, None),
    ],
    "too few groups": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.NO, StepState.VOTED_NO),
        (Event.LOSE, StepState.LOST),
    ],
    "healed at its end": [
        (Event.BEHIND, StepState.HEALING),
        (Event.LOADED, StepState.HEALED),
        (Event.YES, StepState.VOTED_YES),
        (Event.COMMIT, StepState.COMMITTED),
    ],
    "healed before it began": [
        (Event.BEHIND, StepState.HEALING),
        (Event.LOADED, StepState.HEALED),
        (Event.JOINED, StepState.TRAINING),
        (Event.YES, StepState.VOTED_YES),
    ],
    "a heal that was not loaded": [
        (Event.BEHIND, StepState.HEALING),
        (Event.YES, None),
        (Event.JOINED, None),
        (Event.DROP, StepState.DROPPED),
    ],
    "healed and failed": [
        (Event.BEHIND, StepState.HEALING),
        (Event.LOADED, StepState.HEALED),
        (Event.ERROR, StepState.FAILED),
        (Event.YES, None),
        (Event.NO, StepState.VOTED_NO),
        (Event.LOSE, StepState.LOST),
        (Event.COMMIT, None),
    ],
    "failed, then its heal came": [
        (Event.BEHIND, StepState.HEALING),
        (Event.ERROR, StepState.FAILED),
        (Event.LOADED, StepState.FAILED),
        (Event.JOINED, StepState.FAILED),
        (Event.YES, None),
        (Event.NO, StepState.VOTED_NO),
    ],
    "failed before its quorum was known": [
        (Event.ERROR, StepState.FAILED),
        (Event.QUORUM, StepState.FAILED),
        (Event.ERROR, StepState.FAILED),
        (Event.NO, StepState.VOTED_NO),
        (Event.LOSE, StepState.LOST),
    ],
    "failed before its quorum was known, and has to heal": [
        (Event.ERROR, StepState.FAILED),
        (Event.BEHIND, StepState.FAILED),
        (Event.LOADED, StepState.FAILED),
    ],
    "an error after this rank's yes": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.YES, StepState.VOTED_YES),
        (Event.ERROR, StepState.VOTED_YES),
        (Event.COMMIT, StepState.COMMITTED),
        (Event.ERROR, StepState.COMMITTED),
    ],
    "voted before its quorum was known": [
        (Event.YES, None),
        (Event.NO, None),
        (Event.COMMIT, None),
        (Event.LOSE, None),
    ],
    "voted twice, because the first vote was not answered": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.YES, StepState.VOTED_YES),
        (Event.YES, StepState.VOTED_YES),
        (Event.NO, StepState.VOTED_NO),
        (Event.YES, None),
        (Event.DROP, StepState.DROPPED),
    ],
    "voted twice, on two steps in one quorum": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.YES, StepState.VOTED_YES),
        (Event.COMMIT, StepState.COMMITTED),
        (Event.COMMIT, None),
        (Event.YES, StepState.VOTED_YES),
        (Event.LOSE, StepState.LOST),
        (Event.NO, StepState.VOTED_NO),
        (Event.LOSE, StepState.LOST),
    ],
    "asked twice": [(Event.DROP, StepState.DROPPED), (Event.DROP, None), (Event.QUORUM, None)],
    "asked twice, the first had its quorum": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.QUORUM, None),
        (Event.BEHIND, None),
        (Event.DROP, StepState.DROPPED),
        (Event.ERROR, StepState.DROPPED),
        (Event.YES, None),
    ],
    "asked twice, the first had healed": [
        (Event.BEHIND, StepState.HEALING),
        (Event.LOADED, StepState.HEALED),
        (Event.DROP, StepState.DROPPED),
    ],
    "asked twice, the first had failed": [(Event.ERROR, StepState.FAILED), (Event.DROP, StepState.DROPPED)],
    "asked twice, the vote on the first is not decided": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.YES, StepState.VOTED_YES),
        (Event.DROP, StepState.DROPPED),
    ],
    "healed, and too few groups take part": [
        (Event.BEHIND, StepState.HEALING),
        (Event.LOADED, StepState.HEALED),
        (Event.NO, StepState.VOTED_NO),
        (Event.NO, StepState.VOTED_NO),
        (Event.ERROR, StepState.VOTED_NO),
        (Event.COMMIT, StepState.COMMITTED),  # only with a stand-in for the manager server
        (Event.NO, StepState.VOTED_NO),
    ],
    "lost, then the next step in the same quorum": [
        (Event.QUORUM, StepState.TRAINING),
        (Event.ERROR, StepState.FAILED),
        (Event.NO, StepState.VOTED_NO),
        (Event.LOSE, StepState.LOST),
        (Event.ERROR, StepState.LOST),
        (Event.YES, StepState.VOTED_YES),
    ],
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_transitions_of_a_step(path: Path) -> None:
    state = StepState.ASKED
    for event, expected in path:
        if expected is None:
            with pytest.raises(RuntimeError, match=f"a step that {state.value} cannot {event.value}"):
                after(state, event)
        else:
            state = after(state, event)
            assert state is expected, event


def test_each_row_is_on_a_path() -> None:
    walked = {(StepState.UNASKED, Event.ERROR)}  # walked in the next test
    for path in PATHS.values():
        state = StepState.ASKED
        for event, expected in path:
            if expected is not None:
                walked.add((state, event))
                state = expected
    assert walked == TRANSITIONS.keys()


def test_before_the_first_step_there_are_errors_only() -> None:
    allowed = {event for event in Event if (StepState.UNASKED, event) in TRANSITIONS}
    assert allowed == {Event.ERROR}
    assert after(StepState.UNASKED, Event.ERROR) is StepState.UNASKED


def test_invariants_of_all_rows() -> None:
    for (state, event), to in TRANSITIONS.items():
        if to is StepState.COMMITTED and state is not StepState.COMMITTED:
            assert event is Event.COMMIT and state in (StepState.VOTED_YES, StepState.VOTED_NO), (
                "only after this rank's vote"
            )
        if state is StepState.FAILED:
            assert to in (StepState.FAILED, StepState.VOTED_NO, StepState.DROPPED), (
                "an error is not taken back"
            )
        if state is StepState.DROPPED:
            assert to is StepState.DROPPED
    assert all((state, Event.ERROR) in TRANSITIONS for state in StepState), "an error comes whenever it likes"
    reached = {StepState.ASKED, StepState.UNASKED, *TRANSITIONS.values()}
    assert reached == set(StepState)


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
    assert step.state is StepState.LOST and not step.undecided


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
    assert step.healing and step.state is StepState.HEALED
    step.joined()
    assert not step.healing and step.state is StepState.TRAINING


@pytest.mark.parametrize("during", [Event.BEHIND, Event.LOADED, Event.JOINED])
def test_an_error_is_not_lost_among_other_events(during: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """It arrives on another thread, between the check of the state and its change."""
    step = Step(StepRequest(True, False, timedelta(seconds=1)), MagicMock(), [], None)
    went_on = threading.Event()  # the error is stored, or waits for the other event
    step._lock = Contended(went_on)  # type: ignore[assignment]

    def fail() -> None:
        step.failed(RuntimeError("a collective failed"))
        went_on.set()

    failing = threading.Thread(target=fail, daemon=True)

    def with_an_error(state: StepState, event: Event) -> StepState:
        if event is during:
            failing.start()
            assert went_on.wait(30)
        return after(state, event)

    monkeypatch.setattr("torchft._manager.step.step.after", with_an_error)
    step.follow(plan(result()))
    step.loaded()
    step.joined()
    failing.join(30)
    assert step.state is StepState.FAILED and not step.vote(least=1)


# Steps of a Manager


def test_a_step_ends_when_the_next_one_begins(fixture: Fixture) -> None:
    manager = fixture.manager()
    assert manager._current.state is StepState.UNASKED
    manager.start_quorum()
    first = manager._current
    manager.allreduce(torch.ones(2)).wait()
    assert manager.should_commit() and first.state is StepState.COMMITTED
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
    assert first.state is StepState.DROPPED and manager._current.state in (StepState.ASKED, StepState.HEALING)
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
    assert manager._current.state is StepState.VOTED_YES
    assert manager.should_commit() and manager.current_step() == 1


def test_an_error_after_the_vote_counts_when_it_is_asked_again() -> None:
    step = begun(heal=False, max_replica_rank=1)
    assert step.vote(least=1) is True
    step.failed(RuntimeError("late"))
    assert step.state is StepState.VOTED_YES
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
    assert manager._current.state is StepState.DROPPED and manager.draining()


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
