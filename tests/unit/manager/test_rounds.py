"""Tests which thread follows the result of a quorum round, and that every wait for a round ends."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock

import pytest

from tests.unit.waiting import wait_until
from torchft._manager.edge import GroupServer, _NativeServer, as_server
from torchft._manager.quorum.plan import Planner, WorldSizeMode
from torchft._manager.quorum.rounds import (
    JobFinished,
    LateRound,
    Round,
    Rounds,
)
from torchft._torchft import LighthouseServer, ManagerClient, ManagerServer, QuorumRequest, QuorumResult

LONG = timedelta(seconds=60)
REQUEST = QuorumRequest(
    group_rank=0,
    step=0,
    checkpoint_metadata="here",
    shrink_only=False,
    commit_failures=0,
    reconfigure_handle="handle",
    committed_quorum_id=3,
)


class FakeClient:
    """Ends rounds when the test triggers it."""

    def __init__(self) -> None:
        self.results: queue.SimpleQueue[QuorumResult | BaseException] = queue.SimpleQueue()
        self.asked = 0
        self.stands = False

    def _begin_round(self, request: QuorumRequest, timeout: timedelta) -> object:
        self.asked += 1
        return object()

    def _stands_for(self, request: QuorumRequest, last: Optional[QuorumResult]) -> bool:
        return self.stands

    def _end_round(self, begun: object) -> QuorumResult:
        result = self.results.get(timeout=20)
        if isinstance(result, BaseException):
            raise result
        return result


class Followed:
    """Records which thread followed which result."""

    def __init__(self, error: Optional[Exception] = None) -> None:
        self.by: list[tuple[QuorumResult, str]] = []
        self._error = error

    def __call__(self, result: QuorumResult) -> None:
        self.by.append((result, threading.current_thread().name))
        if self._error is not None:
            raise self._error


class Rank:
    """The rounds of a rank through a client."""

    def __init__(self) -> None:
        self.client = FakeClient()
        self.server = _NativeServer(self.client, 0)
        self.rounds = Rounds(self.server.ask)

    def begin(self, follow: Followed, **changes: Any) -> Round:
        return begin(self.server, self.rounds, follow, **changes)

    def first_round(self) -> QuorumResult:
        followed, result = Followed(), QuorumResult(quorum_id=1)
        begun = self.begin(followed)
        self.client.results.put(result)
        begun.result()
        assert followed.by == [(result, "torchft_quorum")]
        return result


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.client.results.put(RuntimeError("closed"))
    rank.rounds.shutdown(wait=True)


def begin(server: GroupServer, rounds: Rounds, follow: Followed, **changes: Any) -> Round:
    request = replace(REQUEST, **changes)
    standing = server.standing(request)
    if standing is None:
        return rounds.begin(follow, request, LONG)
    begun = Round(follow)
    begun.end(standing)
    return begun


def test_a_result_is_followed_without_anyone_asking(rank: Rank) -> None:
    followed = Followed()
    begun = rank.begin(followed)
    rank.client.results.put(QuorumResult(quorum_id=1))
    assert begun._ended.wait(20)
    assert [who for _, who in followed.by] == ["torchft_quorum"]
    begun.result()
    assert len(followed.by) == 1


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"max_step": 1}, True),
        ({"max_step": 1, "quorum_id": 2}, False),
        ({"max_step": 1, "recover_dst_replica_ranks": [1]}, False),
    ],
)
def test_the_same_result_again_is_the_same_object(rank: Rank, changes: dict[str, Any], same: bool) -> None:
    result = rank.first_round()
    followed = Followed()
    begun = rank.begin(followed, step=1)
    rank.client.results.put(again := replace(result, **changes))
    begun.result()
    begun.result()
    assert followed.by == [(again, "torchft_quorum")] and (followed.by[0][0] is result) is same


def test_a_heal_is_a_change_each_time(rank: Rank) -> None:
    for _ in range(2):
        followed = Followed()
        begun = rank.begin(followed)
        rank.client.results.put(result := QuorumResult(quorum_id=1, heal=True))
        begun.result()
        assert followed.by[0][0] is result


def test_a_heal_of_other_groups_is_a_change_each_time(rank: Rank) -> None:
    """This group waits for it in the step of the result, like the groups that take part in it."""
    planner = Planner(True, WorldSizeMode.DYNAMIC, 1)
    for step in range(3):
        followed = Followed()
        begun = rank.begin(followed, step=step)
        others_heal = QuorumResult(quorum_id=1, max_step=step, replica_world_size=6, max_world_size=5)
        rank.client.results.put(others_heal)
        begun.result()
        assert planner.plan(followed.by[0][0], allow_heal=True).max_step == step


def test_a_quorum_that_stands_is_followed_at_once(rank: Rank) -> None:
    result = rank.first_round()
    rank.client.stands = True
    for step in (1, 2):
        followed = Followed()
        begun = rank.begin(followed, step=step)
        assert begun.answer() is result and result.max_step == step
        begun.result()
        begun.result()
        assert followed.by == [(result, threading.current_thread().name)]
    assert rank.client.asked == 1


def test_an_error_while_a_standing_quorum_is_followed_reaches_the_caller(rank: Rank) -> None:
    rank.first_round()
    rank.client.stands = True
    begun = rank.begin(Followed(ValueError("no connection")))
    begun.wait()  # does not raise
    for _ in range(2):
        with pytest.raises(ValueError, match="no connection"):
            begun.result()
    rank.begin(Followed()).result()


def test_many_may_wait_for_a_round(rank: Rank) -> None:
    rank.first_round()
    followed = Followed()
    begun = rank.begin(followed)
    waiting = [threading.Thread(target=begun.result) for _ in range(4)]
    for thread in waiting:
        thread.start()
    rank.client.results.put(QuorumResult(quorum_id=1))
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    assert len(followed.by) == 1


def refused(refusal: str, error: Exception) -> Exception:
    """An error as the native core raises it."""
    error.refusal = refusal  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("refusal", "returns", "status"), [("ended", "", 0), ("ended", "1", 66), ("unneeded", "", 0)]
)
def test_a_group_that_has_nothing_to_train_ends(
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    refusal: str,
    returns: str,
    status: int,
) -> None:
    monkeypatch.setenv("TORCHFT_RETURNS", returns)
    begun = rank.begin(Followed())
    rank.client.results.put(refused(refusal, RuntimeError("at step 8")))
    with pytest.raises(SystemExit) as ended:
        begun.result()
    assert ended.value.code == status and isinstance(ended.value, JobFinished) == (refusal == "ended")


def test_a_standby_asks_until_it_is_needed(rank: Rank) -> None:
    begun = rank.begin(Followed())
    for _ in range(3):
        rank.client.results.put(refused("held", TimeoutError("max_replicas is 2")))
    rank.client.results.put(QuorumResult(quorum_id=1))
    assert begun.answer().quorum_id == 1 and rank.client.asked == 4


def test_the_text_of_an_error_says_nothing(rank: Rank) -> None:
    begun = rank.begin(Followed())
    rank.client.results.put(RuntimeError("the training has ended: this standby is not needed"))
    with pytest.raises(RuntimeError, match="the training has ended: "):
        begun.result()


@pytest.mark.parametrize("error", [TimeoutError("no quorum"), RuntimeError("lighthouse")])
def test_an_error_reaches_all_callers_and_the_next_round_starts_afresh(rank: Rank, error: Exception) -> None:
    result = rank.first_round()
    begun = rank.begin(Followed())
    rank.client.results.put(error)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            begun.result()
    begun.wait()  # does not raise
    followed = Followed()
    again = rank.begin(followed)
    rank.client.results.put(QuorumResult(quorum_id=1))
    again.result()
    assert followed.by[0][0] is not result, "the round before has failed"


def test_an_error_while_following_reaches_the_caller(rank: Rank) -> None:
    begun = rank.begin(Followed(ValueError("cannot heal")))
    rank.client.results.put(QuorumResult(quorum_id=2))
    assert begun.answer().quorum_id == 2
    with pytest.raises(ValueError, match="cannot heal"):
        begun.result()


def test_the_thread_keeps_no_round_alive(rank: Rank) -> None:
    """A round refers to its Manager."""
    followed = Followed()
    begun = weakref.ref(rank.begin(followed))
    wait_until(lambda: begun() is None)
    rank.client.results.put(QuorumResult(quorum_id=1))
    rank.first_round()
    assert followed.by == []


def test_a_round_ends_if_another_thread_shuts_the_rounds_down_meanwhile() -> None:
    asked, result = threading.Event(), QuorumResult(quorum_id=1)
    ends = threading.Thread(target=lambda: (asked.wait(20), rounds.shutdown(wait=True)))

    def ask(request: QuorumRequest, timeout: timedelta) -> Any:
        if request.step == 1:
            asked.set()
            ends.join(0.2)  # it may have ended, or waits for this round
        return lambda: result

    rounds, followed = Rounds(ask), Followed()
    rounds.begin(followed, REQUEST, LONG).result()
    ends.start()
    begun = rounds.begin(followed, replace(REQUEST, step=1), LONG)
    assert begun._ended.wait(20)
    ends.join(20)
    with pytest.raises(RuntimeError, match="shut down"):
        rounds.begin(followed, REQUEST, LONG)


UPSTREAM: dict[str, Any] = {  # the arguments that other clients get
    "group_rank": 0,
    "step": 0,
    "checkpoint_metadata": "here",
    "shrink_only": False,
    "timeout": LONG,
    "commit_failures": 0,
    "init_sync": True,
    "reconfigure_handle": "handle",
}


def test_a_call_that_waits_for_a_quorum_is_made_on_a_thread() -> None:
    answers: list[Any] = [result := QuorumResult(quorum_id=3), TimeoutError("no quorum")]

    def ask(**request: Any) -> QuorumResult:
        assert request == UPSTREAM
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    server = GroupServer(SimpleNamespace(_quorum=ask), 0)
    rounds, followed = Rounds(server.ask), Followed()
    assert server.standing(REQUEST) is None
    rounds.begin(followed, REQUEST, LONG).result()
    assert followed.by == [(result, "torchft_quorum")]
    begun = rounds.begin(followed, REQUEST, LONG)
    with pytest.raises(TimeoutError, match="no quorum"):
        begun.result()
    rounds.shutdown(wait=True)


def test_rounds_of_the_native_core() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    server = ManagerServer("g", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "store:1", 1, LONG, LONG, 0)
    client = ManagerClient(server.address(), LONG)
    group, followed = as_server(client, 0), Followed()
    rounds = Rounds(group.ask)
    for step in range(4):
        begin(group, rounds, followed, step=step).result()
        assert followed.by[-1][0].max_step == step
        assert client.should_commit(0, step, True, LONG)
    begin(group, rounds, followed, step=4, commit_failures=1).result()  # a new quorum
    threads = [name for _, name in followed.by]
    assert threads[0] == threads[4] == "torchft_quorum", "in between, the quorum may stand"
    assert followed.by[1][0] is followed.by[0][0], "the very same result again"
    assert followed.by[4][0].quorum_id > followed.by[3][0].quorum_id
    client.shutdown()
    rounds.shutdown(wait=True)
    server.shutdown()
    lighthouse.shutdown()


@pytest.mark.parametrize("need", ["wait", "answer", "result"])
def test_a_late_round_begins_when_it_is_needed(need: str) -> None:
    begun: list[Round] = []
    prepare = MagicMock()

    def begin() -> Round:
        prepare.assert_called_once()
        begun.append(Round(MagicMock()))
        begun[0].end(MagicMock())
        return begun[0]

    late = LateRound(begin, prepare)
    assert not begun and not prepare.called
    for _ in range(2):
        getattr(late, need)()
    assert len(begun) == prepare.call_count == 1
    assert late.answer() is begun[0].answer()


def test_a_late_round_fails_as_the_one_that_it_begins() -> None:
    failed = Round(MagicMock())
    failed.end(None, TimeoutError("no quorum in time"))
    late = LateRound(lambda: failed, prepare=lambda: None)
    late.wait()
    with pytest.raises(TimeoutError, match="no quorum in time"):
        late.result()
