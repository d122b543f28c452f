"""Tests which thread follows the result of a quorum round, and that every wait for a round ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Optional
from unittest.mock import MagicMock

import pytest

from torchft._manager.edge import as_server
from torchft._manager.quorum.rounds import (
    JobFinished,
    LateRound,
    NativeRounds,
    Round,
    StandingRound,
    ThreadRounds,
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
    """Ends rounds and reports changes when the test triggers it."""

    def __init__(self) -> None:
        self.results: queue.SimpleQueue[QuorumResult | BaseException | None] = queue.SimpleQueue()
        self.changes: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        self.first: list[bool] = []
        self.stands = False

    def _begin_round(
        self, request: QuorumRequest, timeout: timedelta, last: Optional[QuorumResult]
    ) -> object:
        self.first.append(last is None)
        return object()

    def _stands_for(self, request: QuorumRequest, last: Optional[QuorumResult]) -> bool:
        return self.stands

    def _end_round(self, begun: object, last: Optional[QuorumResult]) -> QuorumResult:
        result = self.results.get(timeout=20)
        if isinstance(result, BaseException):
            raise result
        if result is None:
            assert last is not None
            return last
        return result

    def _wait_change(self, timeout: timedelta) -> bool:
        change = self.changes.get(timeout=20)
        if isinstance(change, Exception):
            raise change
        return change


class Followed:
    """Records which thread followed which result."""

    def __init__(self, error: Optional[Exception] = None) -> None:
        self.by: list[tuple[QuorumResult, str]] = []
        self._error = error

    def __call__(self, result: QuorumResult) -> None:
        self.by.append((result, threading.current_thread().name))
        if self._error is not None:
            raise self._error


@pytest.fixture
def client() -> Iterator[FakeClient]:
    client = FakeClient()
    yield client
    client.changes.put(RuntimeError("closed"))


def begin(rounds: NativeRounds, follow: Followed, **changes: Any) -> Round:
    request = replace(REQUEST, **changes)
    standing = rounds.standing(request)
    return rounds.begin(follow, request, LONG) if standing is None else StandingRound(standing, follow)


def first_round(rounds: NativeRounds, client: FakeClient) -> QuorumResult:
    """Runs a first round. Its result is a change; the result of the next round can equal it."""
    followed, result = Followed(), QuorumResult(quorum_id=1)
    begun = begin(rounds, followed)
    client.results.put(result)
    client.changes.put(True)
    begun.result()
    assert followed.by == [(result, "torchft_quorum")]
    return result


def test_a_change_is_followed_by_the_thread_without_anyone_asking(client: FakeClient) -> None:
    rounds, followed = NativeRounds(client), Followed()
    begun = begin(rounds, followed)
    client.results.put(QuorumResult(quorum_id=1))
    client.changes.put(True)
    assert begun._ended.wait(20)
    assert [who for _, who in followed.by] == ["torchft_quorum"]
    begun.result()
    assert len(followed.by) == 1


def test_a_result_without_a_change_is_followed_by_the_first_caller(client: FakeClient) -> None:
    rounds = NativeRounds(client)
    result = first_round(rounds, client)
    followed = Followed()
    begun = begin(rounds, followed, step=1)
    client.results.put(None)
    begun.result()
    begun.result()
    assert followed.by == [(result, threading.current_thread().name)]
    assert client.first == [True, False]


def test_a_quorum_that_stands_is_followed_at_once(client: FakeClient) -> None:
    rounds = NativeRounds(client)
    result = first_round(rounds, client)
    client.stands = True
    for step in (1, 2):
        followed = Followed()
        begun = begin(rounds, followed, step=step)
        assert begun.answer() is result and result.max_step == step
        begun.result()
        begun.result()
        assert begun.ended()
        assert followed.by == [(result, threading.current_thread().name)]
    assert client.first == [True]


def test_an_error_while_a_standing_quorum_is_followed_reaches_the_caller(client: FakeClient) -> None:
    rounds = NativeRounds(client)
    first_round(rounds, client)
    client.stands = True
    begun = begin(rounds, Followed(ValueError("no connection")))
    begun.wait()  # does not raise
    for _ in range(2):
        with pytest.raises(ValueError, match="no connection"):
            begun.result()
    begin(rounds, Followed()).result()


def test_many_may_wait_for_a_round(client: FakeClient) -> None:
    rounds = NativeRounds(client)
    first_round(rounds, client)
    followed = Followed()
    begun = begin(rounds, followed)
    waiting = [threading.Thread(target=begun.result) for _ in range(4)]
    for thread in waiting:
        thread.start()
    client.results.put(None)
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
    client: FakeClient, monkeypatch: pytest.MonkeyPatch, refusal: str, returns: str, status: int
) -> None:
    monkeypatch.setenv("TORCHFT_RETURNS", returns)
    begun = begin(NativeRounds(client), Followed())
    client.results.put(refused(refusal, RuntimeError("at step 8")))
    with pytest.raises(SystemExit) as ended:
        begun.result()
    assert ended.value.code == status and isinstance(ended.value, JobFinished) == (refusal == "ended")


def test_a_standby_asks_until_it_is_needed(client: FakeClient) -> None:
    begun = begin(NativeRounds(client), Followed())
    for _ in range(3):
        client.results.put(refused("held", TimeoutError("max_replicas is 2")))
    client.results.put(QuorumResult(quorum_id=1))
    assert begun.answer().quorum_id == 1 and len(client.first) == 4


def test_the_text_of_an_error_says_nothing(client: FakeClient) -> None:
    begun = begin(NativeRounds(client), Followed())
    client.results.put(RuntimeError("the training has ended: this standby is not needed"))
    with pytest.raises(RuntimeError, match="the training has ended: "):
        begun.result()


@pytest.mark.parametrize("error", [TimeoutError("no quorum"), RuntimeError("lighthouse")])
def test_an_error_reaches_all_callers_and_the_next_round_starts_afresh(
    client: FakeClient, error: Exception
) -> None:
    rounds = NativeRounds(client)
    first_round(rounds, client)
    begun = begin(rounds, Followed())
    client.results.put(error)
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            begun.result()
    begun.wait()  # does not raise
    begin(rounds, Followed())
    assert client.first[-1], "the result of the failed round is not known"


@pytest.mark.parametrize("changed", [True, False])
def test_an_error_while_following_reaches_the_caller(client: FakeClient, changed: bool) -> None:
    rounds = NativeRounds(client)
    first_round(rounds, client)
    begun = begin(rounds, Followed(ValueError("cannot heal")))
    client.results.put(QuorumResult(quorum_id=2) if changed else None)
    if changed:
        client.changes.put(True)
    with pytest.raises(ValueError, match="cannot heal"):
        begun.result()


def test_ctrl_c_is_raised_at_once_and_ends_the_round(client: FakeClient) -> None:
    rounds = NativeRounds(client)
    begun = begin(rounds, Followed())
    client.results.put(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        begun.wait()
    begun.wait()


def test_a_client_that_is_shut_down_ends_the_round_that_nobody_will_follow(client: FakeClient) -> None:
    rounds = NativeRounds(client)
    begun = begin(rounds, Followed())
    client.results.put(QuorumResult(quorum_id=1))  # a change that is never reported to the quorum thread
    client.changes.put(RuntimeError("the client is closed"))
    with pytest.raises(RuntimeError, match="closed"):
        begun.result()
    rounds.shutdown(wait=True)
    with pytest.raises(RuntimeError, match="closed"):
        begin(rounds, Followed())


def test_a_wait_for_changes_that_times_out_is_repeated(client: FakeClient) -> None:
    rounds = NativeRounds(client)
    client.changes.put(False)
    first_round(rounds, client)


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

    rounds, followed = ThreadRounds(ask), Followed()
    assert rounds.standing(REQUEST) is None
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
    rounds, followed = as_server(client, 0).rounds(), Followed()
    assert isinstance(rounds, NativeRounds)
    for step in range(4):
        begin(rounds, followed, step=step).result()
        assert followed.by[-1][0].max_step == step
        assert client.should_commit(0, step, True, LONG)
    begin(rounds, followed, step=4, commit_failures=1).result()  # a new quorum
    threads = [name for _, name in followed.by]
    here = threading.current_thread().name
    assert threads == ["torchft_quorum", here, here, here, "torchft_quorum"]
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
        begun.append(Round())
        begun[0]._set_answer(MagicMock())
        begun[0].end()
        return begun[0]

    late = LateRound(begin, prepare)
    assert not late.ended() and not begun and not prepare.called
    for _ in range(2):
        getattr(late, need)()
    assert late.ended() and len(begun) == prepare.call_count == 1
    assert late.answer() is begun[0].answer()


def test_a_late_round_fails_as_the_one_that_it_begins() -> None:
    failed = Round()
    failed.end(TimeoutError("no quorum in time"))
    late = LateRound(lambda: failed, prepare=lambda: None)
    late.wait()
    with pytest.raises(TimeoutError, match="no quorum in time"):
        late.result()
