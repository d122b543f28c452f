"""The request thread of a group that heals in pieces, and its requests to sources."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from tests.unit.waiting import wait_until
from torchft._manager import joining, sources
from torchft._manager.heal_along import Along
from torchft._manager.joining import Target
from torchft._manager.recovery import Recovery
from torchft._manager.state import Position
from torchft._manager.together import Agreement, Ranks
from torchft._manager.tracked import Parameters
from torchft._records import MemberFailure
from torchft.checkpointing._http_client import Refused
from torchft.checkpointing._pieces import Answer
from torchft.checkpointing.transport import CheckpointError

DEADLINE_SEC = 20


def plan(step: int, source: str, *additional: str) -> Any:
    return SimpleNamespace(
        max_step=step,
        quorum_id=step,
        committed_quorum_id=step - 1,
        source=SimpleNamespace(manager_address=source, replica_id=f"{source}/0"),
        additional_sources=list(additional),
    )


def target_of(parameters: Parameters, locate: Callable[[str], str]) -> Target:
    return Target(parameters, locate, timeout=DEADLINE_SEC, additional=3, logger=MagicMock())


def test_a_failed_source_is_replaced_by_that_of_the_next_quorum() -> None:
    located: queue.SimpleQueue[str] = queue.SimpleQueue()

    def locate(address: str) -> str:
        located.put(address)
        raise RuntimeError(f"{address} was not reached")

    parameters = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    target = target_of(parameters, locate)
    try:
        target.quorum(plan(7, "first"))
        assert located.get(timeout=DEADLINE_SEC) == "first"
        target.quorum(plan(8, "second"))
        while (address := located.get(timeout=DEADLINE_SEC)) != "second":
            assert address == "first"
        assert target.heal.abandoned is None
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)
    assert not target._thread.is_alive()


def test_a_failure_of_the_previous_source_does_not_count() -> None:
    """The next quorum names another source while a request to the first one is in progress."""
    asked, answer = queue.SimpleQueue[str](), queue.SimpleQueue[Exception]()

    def locate(address: str) -> str:
        asked.put(address)
        raise answer.get(timeout=DEADLINE_SEC)

    parameters = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    target = target_of(parameters, locate)
    try:
        target.quorum(plan(7, "first"))
        assert asked.get(timeout=DEADLINE_SEC) == "first"
        target.quorum(plan(8, "second"))
        answer.put(RuntimeError("first was not reached"))
        assert asked.get(timeout=DEADLINE_SEC) == "second"
        assert not target.sources.failing
    finally:
        answer.put(RuntimeError("the test is over"))
        target.stop()
        target._thread.join(DEADLINE_SEC)


def test_an_assigned_source_that_fails_too_often_ends_the_heal(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(kind: str, argument: str) -> Answer:
        raise CheckpointError("its connection broke")

    monkeypatch.setattr(joining, "Asker", lambda *_: SimpleNamespace(ask=ask, abort=lambda: None, close=lambda: None))
    monkeypatch.setattr(sources, "FIRST_PAUSE", 0.0)
    target = target_of(Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())]), lambda address: address)
    target.quorum(plan(7, "source"))
    target._thread.join(DEADLINE_SEC)
    assert not target._thread.is_alive()
    assert target.heal.abandoned == "8 requests in a row failed, the last one: its connection broke"


def test_a_head_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A received head ends a series of failures, so the source no longer counts as failing."""
    parameters = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    heads, over = iter([CheckpointError("its connection broke")]), threading.Event()

    def ask(kind: str, argument: str) -> Answer:
        if kind == "head":
            for error in heads:
                raise error
            return Peer(parameters, 7).ask(kind, argument)
        assert over.wait(DEADLINE_SEC)
        raise CheckpointError("the test is over")

    monkeypatch.setattr(joining, "Asker", lambda *_: SimpleNamespace(ask=ask, abort=over.set, close=lambda: None))
    monkeypatch.setattr(sources, "FIRST_PAUSE", 0.0)
    target = target_of(parameters, lambda address: address)
    try:
        target.quorum(plan(7, "source"))
        with target._cond:
            assert target._cond.wait_for(lambda: 7 in target._heads, DEADLINE_SEC)
            assert not target.sources.failing
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)


class Peer(NamedTuple):
    """A source that serves these parameters in pieces, at this step."""

    parameters: Parameters
    step: int

    def ask(self, kind: str, argument: str) -> Answer:
        if kind == "head":
            head = {"layout": self.parameters.layout(), "hyperparameters": self.parameters.hyperparameters()}
            return Answer(self.step, head, torch.empty(0, dtype=torch.uint8))
        value, parts = self.parameters.read(*map(int, argument.split("-")))
        return Answer(self.step, value, torch.cat(parts))

    def abort(self) -> None:
        pass

    close = abort


def test_a_piece_of_a_source_that_fails_comes_from_another_in_the_same_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The assigned source sends its head and fails, an additional one refuses, and another one sends all pieces."""
    parameters = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    theirs = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def make(source: str, *_: object) -> Any:
        peer = Peer(theirs, 7)

        def ask(kind: str, argument: str) -> Answer:
            asked.put(f"{source}: {kind}")
            if source == "refuses":
                raise Refused("this source gives its state as a whole")
            if source == "fails" and kind != "head":
                raise CheckpointError("its connection broke")
            return peer.ask(kind, argument)

        return SimpleNamespace(ask=ask, abort=peer.abort, close=peer.close)

    monkeypatch.setattr(joining, "Asker", make)
    target = target_of(parameters, lambda address: address)
    try:
        target.quorum(plan(7, "fails", "refuses", "gives"))
        seen: list[str] = []
        while seen.count("gives: piece") < len(target.heal.pieces):
            seen.append(asked.get(timeout=DEADLINE_SEC))
        assert seen[0] == "fails: head" and seen.count("refuses: piece") == 1
        with target._cond:
            assert target._cond.wait_for(lambda: len(target._arrived) == 2, DEADLINE_SEC)
        target.advance(reduced=False)
        with target._cond:
            assert target._cond.wait_for(lambda: not target._arrived, DEADLINE_SEC)
        assert target.heal.abandoned is None and target.heal.missing == 0
        assert all(torch.equal(mine, yours) for mine, yours in zip(parameters.all, theirs.all))
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)


@pytest.mark.parametrize("decision", [True, False, None])
def test_a_gradient_is_applied_once_the_source_says_that_it_has_committed(
    monkeypatch: pytest.MonkeyPatch, decision: Optional[bool]
) -> None:
    """Without that report the gradient is kept until the next quorum, which shows whether the step was committed."""
    ours, theirs = (nn.Linear(2, 2) for _ in range(2))
    parameters, source = (Parameters([torch.optim.SGD(model.parameters(), lr=1.0)]) for model in (ours, theirs))
    asked: list[str] = []

    def ask(kind: str, argument: str) -> Answer:
        if kind != "decision":
            return Peer(source, 7).ask(kind, argument)
        asked.append(argument)
        if decision is None:
            raise CheckpointError("the source does not answer")
        return Answer(7, decision, torch.empty(0, dtype=torch.uint8))

    monkeypatch.setattr(joining, "Asker", lambda *_: SimpleNamespace(ask=ask, abort=lambda: None, close=lambda: None))
    target = target_of(parameters, lambda address: address)
    try:
        target.quorum(plan(7, "source"))
        with target._cond:
            assert target._cond.wait_for(lambda: len(target._arrived) == 2, DEADLINE_SEC)
        target.advance(reduced=False)
        with target._cond:
            assert target._cond.wait_for(lambda: target.heal.missing == 0, DEADLINE_SEC)
        for p in ours.parameters():
            p.grad = torch.ones_like(p)
        assert target.advance(reduced=True) is None
        applied = float(decision is True)
        assert all(torch.equal(mine, yours - applied) for mine, yours in zip(ours.parameters(), theirs.parameters()))
        assert sorted(target._kept) == ([] if decision else [0, 1])
        target.quorum(plan(8, "source"))
        assert target.heal.applies == (decision is not True)
        with target._cond:
            assert target._cond.wait_for(lambda: 8 in target._heads, DEADLINE_SEC)
        assert target.advance(reduced=True) is None
        assert asked[1:] == ([] if decision is None else ["8-8"]), "a source that did not answer is not asked again"
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)


@pytest.mark.parametrize("changes", [False, True])
def test_the_last_gradient_is_applied_before_the_vote(monkeypatch: pytest.MonkeyPatch, changes: bool) -> None:
    """In the last step, only the rest of the state is loaded before the vote, because other groups wait for the vote.

    If the training loop changes a gradient in place while it is applied, the heal starts over. This also holds if
    PyTorch increments the version of the gradient only after it was applied.
    """
    ours, theirs = (nn.Linear(2, 2) for _ in range(2))
    optimizers = [torch.optim.Adam(model.parameters()) for model in (ours, theirs)]
    parameters, source = (Parameters([optimizer]) for optimizer in optimizers)
    step = 7
    window = threading.Lock()

    def ask(kind: str, argument: str) -> Answer:
        if kind == "decision":
            raise Refused("this source does not report its decision")
        with window:
            return answer(kind, argument)

    def answer(kind: str, argument: str) -> Answer:
        if kind == "rest":
            return Answer(step, {"structure": {}, "regions": []}, torch.empty(0, dtype=torch.uint8))
        if kind == "digest":
            return Answer(step, source.digest(*map(int, argument.split("-"))), torch.empty(0, dtype=torch.uint8))
        return Peer(source, step).ask(kind, argument)

    monkeypatch.setattr(joining, "Asker", lambda *_: SimpleNamespace(ask=ask, abort=lambda: None, close=lambda: None))
    monkeypatch.setattr(Target, "_state", lambda *_: {"whole": True})
    applied: queue.SimpleQueue[str] = queue.SimpleQueue()
    of_class = Parameters.step

    def noted(self: Parameters, *args: Any) -> None:
        early = threading.current_thread().name == "torchft_heal_along"
        if early and changes:
            for gradient in args[1].values():
                gradient.data.zero_()  # a write in progress: the version is not incremented yet
        of_class(self, *args)
        applied.put("early" if early else "at a vote")

    monkeypatch.setattr(Parameters, "step", noted)
    target = target_of(parameters, lambda address: address)
    try:
        while True:
            target.quorum(plan(step, "source"))
            with target._cond:
                if target.heal.unverified == 0:
                    break
                assert target._cond.wait_for(lambda: target._stopped() or target._wanted() is None, DEADLINE_SEC)
                assert target.heal.abandoned is None
            with window:
                for model in (ours, theirs):
                    for p in model.parameters():
                        p.grad = torch.full_like(p, float(step))
                assert target.advance(reduced=True) is None
                optimizers[1].step()
                step += 1
            assert step < 20
        while applied.get(timeout=DEADLINE_SEC) != "early":
            pass
        if changes:
            with target._cond:  # waits until the request thread has compared the versions
                optimizers[0].zero_grad(set_to_none=False)
            assert target.advance(reduced=True) is None
            assert target.heal.unverified == len(target.heal.pieces) and target.heal.abandoned is None
            return
        assert target.advance(reduced=True) == {"whole": True}
        assert applied.empty()
        assert all(torch.equal(mine, yours) for mine, yours in zip(parameters.all, source.all))
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)


def test_a_source_that_is_reported_to_have_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the vote would wait until the request times out: a stopped process keeps its connection open."""
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    parameters, source = (Parameters([torch.optim.SGD(model.parameters())]) for model in (ours, theirs))
    aborted, asked_for_rest = threading.Event(), threading.Event()

    def ask(kind: str, argument: str) -> Answer:
        if kind == "rest":
            with target._cond:
                asked_for_rest.set()
                target._cond.notify_all()
            assert aborted.wait(DEADLINE_SEC)
            raise CheckpointError("it was aborted")
        if kind == "digest":
            return Answer(step, source.digest(*map(int, argument.split("-"))), torch.empty(0, dtype=torch.uint8))
        return Peer(source, step).ask(kind, argument)

    monkeypatch.setattr(joining, "Asker", lambda *_: SimpleNamespace(ask=ask, abort=aborted.set, close=lambda: None))
    target = target_of(parameters, lambda address: address)
    try:
        for step in range(7, 20):
            target.quorum(plan(step, "source"))
            with target._cond:
                assert target._cond.wait_for(lambda: asked_for_rest.is_set() or target._wanted() is None, DEADLINE_SEC)
            if asked_for_rest.is_set():
                break
            assert target.advance(reduced=True) is None
        assert asked_for_rest.is_set()
        waits, wait_for = threading.Event(), target._cond.wait_for

        def reported_wait(predicate: Callable[[], bool], timeout: float) -> bool:
            if timeout == DEADLINE_SEC:  # for the rest of the state
                waits.set()
            return wait_for(predicate, timeout)

        monkeypatch.setattr(target._cond, "wait_for", reported_wait)
        with ThreadPoolExecutor(1) as pool:
            votes = pool.submit(target.advance, True)
            assert waits.wait(DEADLINE_SEC)
            target.peer_failed(step - 1, "source/0")
            target.peer_failed(step, "additional/0")
            assert not aborted.is_set(), "these failures are of another quorum, or of another group"
            assert target.advance(False) is None, "a step that is lost anyway does not wait"
            target.peer_failed(step, "source/0")
            assert votes.result(DEADLINE_SEC) is None
        assert aborted.is_set() and target.heal.abandoned is None
    finally:
        aborted.set()
        target.stop()
        target._thread.join(DEADLINE_SEC)


@pytest.mark.parametrize("reported", ["before", "meanwhile"])
def test_the_decision_of_a_source_that_is_reported_to_have_failed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, reported: str
) -> None:
    """A stopped process keeps its connection open, so the request would end at its timeout only."""
    parameters, source = (Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())]) for _ in range(2))
    asked = threading.Event()

    def make(*_: object) -> Any:
        aborted = threading.Event()

        def ask(kind: str, argument: str) -> Answer:
            if kind == "head":
                return Peer(source, 7).ask(kind, argument)
            if kind == "decision":
                asked.set()
            assert aborted.wait(DEADLINE_SEC)
            raise CheckpointError("it was aborted")

        return SimpleNamespace(ask=ask, abort=aborted.set, close=lambda: None)

    monkeypatch.setattr(joining, "Asker", make)
    target = target_of(parameters, lambda address: address)
    try:
        target.quorum(plan(7, "source"))
        wait_until(lambda: target._asked, DEADLINE_SEC)
        for p in parameters.all:
            p.grad = torch.ones_like(p)
        with ThreadPoolExecutor(1) as pool:
            if reported == "before":
                target.peer_failed(7, "source/0")
            votes = pool.submit(target.advance, True)
            if reported == "meanwhile":
                assert asked.wait(DEADLINE_SEC)
                target.peer_failed(7, "source/0")
            assert votes.result(DEADLINE_SEC / 2) is None
        assert asked.is_set() == (reported == "meanwhile")
        assert target._kept
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)


def recovery_of(connect: Callable[[str, timedelta], Any]) -> Recovery:
    return Recovery(
        transport=cast(Any, MagicMock(in_place=False)),
        user_state=MagicMock(),
        optimizers=[],
        group_rank=0,
        connect=connect,
        check_peers=lambda: None,
        timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=60),
        sources=1,
        in_background=True,
        wait=MagicMock(),
        agreement=Agreement(MagicMock(), "", 1),
        logger=MagicMock(),
    )


def test_a_source_is_located_once_and_not_for_long() -> None:
    """The timeout is short: the other groups continue to train, and the next quorum may name another source."""
    tried: list[timedelta] = []

    def connect(address: str, timeout: timedelta) -> Any:
        tried.append(timeout)
        raise RuntimeError(f"{address} was not reached")

    with pytest.raises(RuntimeError, match="a host was not reached"):
        recovery_of(connect).locate("a host")
    assert tried == [timedelta(seconds=3)]


def test_a_heal_is_notified_of_failures() -> None:
    recovery = recovery_of(MagicMock())
    recovery.along = MagicMock()
    recovery.peer_failed(MemberFailure(3, "source/0", "its connection broke"))
    recovery.along.peer_failed.assert_called_once_with(3, "source/0")


def test_pieces_wait_for_the_end_of_a_pause_and_heads_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    asked, pauses = queue.SimpleQueue[str](), queue.SimpleQueue[float]()

    def ask(kind: str, argument: str) -> Answer:
        asked.put(kind)
        return Peer(parameters, 7).ask(kind, argument)

    def pause(now: float) -> float:
        pauses.put(now)
        return 1e6

    monkeypatch.setattr(joining, "Asker", lambda *_: SimpleNamespace(ask=ask, abort=lambda: None, close=lambda: None))
    target = target_of(parameters, lambda address: address)
    target.pace = MagicMock(pause=pause)
    try:
        target.quorum(plan(7, "source"))
        target.pace.quorum.assert_called_once()
        pauses.get(timeout=DEADLINE_SEC)
        with target._cond:
            target._cond.notify_all()
        pauses.get(timeout=DEADLINE_SEC)  # without the pause, a piece would have been requested before this call
        assert asked.get(timeout=DEADLINE_SEC) == "head" and asked.empty()
        target.pace.spent.assert_not_called()
        with target._cond:
            target.pace.pause = lambda now: 0.0
            target._cond.notify_all()
        assert asked.get(timeout=DEADLINE_SEC) == "piece"
        assert asked.get(timeout=DEADLINE_SEC) == "piece"
        target.pace.spent.assert_called()
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)


def test_weights_that_were_written_after_a_vote_are_of_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only source fails after the request thread has put the first pieces in place, and before the next vote."""
    optimizer, theirs = (torch.optim.SGD(nn.Linear(2, 2).parameters()) for _ in range(2))
    peer, voted = Peer(Parameters([theirs]), 7), threading.Event()

    def ask(kind: str, argument: str) -> Answer:
        assert kind == "head" or voted.wait(DEADLINE_SEC)
        return peer.ask(kind, argument)

    monkeypatch.setattr(joining, "Asker", lambda *_: SimpleNamespace(ask=ask, abort=lambda: None, close=lambda: None))
    recovery = recovery_of(MagicMock())
    recovery.along = along = Along(
        MagicMock(), [optimizer], str, lambda: None, Ranks(MagicMock(), "", 0, 1), DEADLINE_SEC, 0, MagicMock()
    )
    alone = cast(Any, SimpleNamespace(heal=False, up_to_date=False, quorum_id=8))
    recovery.begin(plan(7, "source"), Position(0, 0, -1), 0.0)
    assert recovery.join(plan(7, "source"))
    target = along._target
    assert target is not None
    try:
        assert recovery.advance(plan(7, "source"), reduced=False) is None
        assert not along.wrote
        voted.set()
        wait_until(lambda: target.heal.missing == 0, DEADLINE_SEC)
        with pytest.raises(RuntimeError, match="its weights are of no step"):
            recovery.follow(alone)
        recovery.pending = {"user": {}}
        assert recovery.load()
        recovery.follow(alone)
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)
