"""The request thread of a group that heals in passing, and its requests to sources."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Optional, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from tests.unit.waiting import wait_until
from torchft._manager.heal import joining
from torchft._manager.heal.in_passing import Fetch, InPassing
from torchft._manager.heal.in_passing_rules import FIRST, Ask
from torchft._manager.heal.joining import Target
from torchft._manager.heal.recovery import Recovery
from torchft._manager.heal.sources import Sources
from torchft._manager.heal.step_parts import StepParts
from torchft._manager.heal.together import Agreement, GroupRanks, HealingRanks
from torchft._manager.heal.tracked import Parameters
from torchft._manager.rank import Position, RankState
from torchft._manager.settings import HealMode
from torchft._records import MemberFailure
from torchft.checkpointing.client.request import Abandon, Busy, RequestRefused
from torchft.checkpointing.codec.requests import StatePart
from torchft.checkpointing.transport import CheckpointError

DEADLINE_SEC = 20


def plan(step: int, source: str = "source") -> Any:
    return SimpleNamespace(
        max_step=step,
        quorum_id=step,
        committed_quorum_id=step - 1,
        num_up_to_date=2,
        participating_rank=None,
        participants=2,
        in_background=True,
        gives_parts=True,
        awaits_heals=True,
        source=SimpleNamespace(manager_address=source, replica_id=f"{source}/0"),
    )


class Peer:
    """A source, and the transport that reaches it.

    Attributes:
        asked: the requests of the target: the key of a part, or "decision"; with another source its name
            before it.
        errors: raised by the next requests for parts, one by one.
        commits: whether it says that it commits each step; None: it does not answer.
        answers: requests for parts wait until this is set, or until they are aborted.
        decides: the same, for requests for a decision.
    """

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.5)
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.commits: Optional[bool] = True
        self.answers, self.decides = threading.Event(), threading.Event()
        self.answers.set()
        self.decides.set()

    def recv_part(
        self, metadata: str, step: int, key: str, timeout: timedelta, memory: Any, abandon: Abandon
    ) -> StatePart:
        self.asked.put(key if metadata == "source" else f"{metadata}: {key}")
        _held(self.answers, abandon)
        if not self.errors.empty():
            raise self.errors.get()
        part = StepParts(Parameters([self.optimizer]), lambda: None).part(key)
        memory(part.value, part.memory.numel()).copy_(part.memory)
        return part

    def recv_decision(
        self, metadata: str, step: int, quorum_id: int, timeout: timedelta, abandon: Abandon
    ) -> Any:
        self.asked.put("decision" if metadata == "source" else f"{metadata}: decision")
        _held(self.decides, abandon)
        if self.commits is None:
            raise CheckpointError("it does not answer")
        return Parameters([self.optimizer]).hyperparameters() if self.commits else None

    def next(self) -> str:
        return self.asked.get(timeout=DEADLINE_SEC)


def _held(until: threading.Event, abandon: Abandon) -> None:
    while not until.wait(0.001):
        abandon.check("the request")
    abandon.check("the request")


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def start(peer: Peer) -> Iterator[Callable[..., tuple[Target, nn.Module]]]:
    """Makes targets, and ends their threads."""
    targets: list[Target] = []

    def make(locate: Callable[[str], str] = lambda address: address) -> tuple[Target, nn.Module]:
        model = nn.Linear(2, 2)
        parameters = Parameters([torch.optim.Adam(model.parameters(), lr=0.5)])
        target = Target(parameters, cast(Any, peer), locate, DEADLINE_SEC, MagicMock())
        target.pace = MagicMock(pause=lambda now: 0.0, of_step=lambda seconds: 1.0, overlap=0.0)
        targets.append(target)
        return target, model

    yield make
    peer.answers.set()
    peer.decides.set()
    for target in targets:
        target.stop()
        if target._thread.ident is not None:
            target._thread.join(DEADLINE_SEC)
            assert not target._thread.is_alive()


def until(target: Target, ready: Callable[[], bool]) -> None:
    with target._cond:
        assert target._cond.wait_for(ready, DEADLINE_SEC)


def gradients(*models: nn.Module) -> None:
    for model in models:
        for p in model.parameters():
            p.grad = torch.ones_like(p)


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(mine, yours) for mine, yours in zip(ours.parameters(), theirs.parameters()))


@pytest.mark.parametrize("commits", [True, False, None])
def test_a_heal_in_passing(peer: Peer, start: Any, commits: Optional[bool]) -> None:
    """The gradient is applied with the hyperparameters of the vote. Without a report that the source has
    committed the step, the heal starts over if it was committed all the same.
    """
    target, ours = start()
    peer.commits = commits
    target.quorum(plan(7), together=True)
    assert peer.next() == "part.0.6.0.0"
    until(target, lambda: target.heal.here == 6)
    assert same(ours, peer.model) and target.wrote
    gradients(ours, peer.model)
    target.reduces()
    peer.optimizer.param_groups[0]["lr"] = 0.25
    target.advance(reduced=True)
    assert peer.next() == "decision"
    peer.optimizer.step()
    assert same(ours, peer.model) == (commits is True)
    target.quorum(plan(8), together=True)
    assert peer.next() == ("part.6.6.0.6" if commits else "part.0.6.0.0")
    until(target, lambda: target.heal.ends or not commits)
    until(target, lambda: target.heal.here == 6)
    assert same(ours, peer.model) and target.heal.abandoned is None


def test_a_step_that_failed_here_is_not_asked_for(peer: Peer, start: Any) -> None:
    target, ours = start()
    target.quorum(plan(7), together=True)
    assert peer.next() == "part.0.6.0.0"
    until(target, lambda: target.heal.here == 6)
    gradients(ours)
    target.advance(reduced=False)
    assert peer.asked.empty() and same(ours, peer.model)


def test_an_optimizer_that_adds_to_its_gradients(peer: Peer, start: Any) -> None:
    target, ours = start()
    for model in (ours, peer.model):
        settings: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "nesterov": True, "foreach": True}
        optimizer = torch.optim.SGD(model.parameters(), **settings)
        if model is ours:
            target.parameters = Parameters([optimizer])
        else:
            peer.optimizer = optimizer
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6)
    for step in (8, 9):
        gradients(ours, peer.model)
        target.advance(reduced=True)
        peer.optimizer.step()
        target.quorum(plan(step), together=True)
        assert same(ours, peer.model) and target.heal.here == 6
        until(target, lambda: target.heal.complete)


def test_a_part_of_another_size_gets_no_memory(peer: Peer, start: Any) -> None:
    target, _ = start()
    value = {"layout": target.parameters.layout, "states": 2 * [{"": {"range": "float32"}}]}
    with pytest.raises(ValueError, match="a part of 1099511627776 bytes in place of 24"):
        target._begin(Ask(0, 6, 0, 0), value, 1 << 40)
    assert target._buffer.numel() == 0


def test_a_part_that_is_late_is_of_no_use(peer: Peer, start: Any) -> None:
    target, ours = start()
    before = [p.detach().clone() for p in ours.parameters()]
    peer.answers.clear()
    target.quorum(plan(7), together=True)
    assert peer.next() == "part.0.6.0.0"
    target.advance(reduced=True)
    assert target.heal._amount == FIRST // 2
    peer.answers.set()
    until(target, lambda: target._request is None)
    assert target.heal.here == 0 and all(torch.equal(a, b) for a, b in zip(before, ours.parameters()))
    target.quorum(plan(8), together=True)
    until(target, lambda: target.heal.here == 6)
    assert same(ours, peer.model) and target.heal.abandoned is None


def test_a_source_that_fails_is_replaced_by_that_of_the_next_quorum(
    start: Any, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_RETRY_SEC", 0.001)
    located: queue.SimpleQueue[str] = queue.SimpleQueue()

    def locate(address: str) -> str:
        located.put(address)
        if address == "first":
            raise RuntimeError(f"{address} was not reached")
        return address

    target, ours = start(locate)
    target.quorum(plan(7, "first"), together=True)
    assert [located.get(timeout=DEADLINE_SEC) for _ in range(3)] == 3 * ["first"], "it is asked again"
    target.advance(True)
    target.quorum(plan(8, "second"), together=True)
    until(target, lambda: target.heal.here == 6)
    assert peer.next() == "second: part.0.6.0.0"
    gradients(ours, peer.model)
    target.advance(True)
    peer.optimizer.step()
    assert peer.next() == "second: decision" and same(ours, peer.model)
    assert target.heal.abandoned is None


def test_a_source_without_parts_in_a_step_is_located_for_its_decision(peer: Peer, start: Any) -> None:
    """Otherwise the parts that have arrived would be of no step."""
    target, ours = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6)
    gradients(ours, peer.model)
    target.advance(True)
    peer.optimizer.step()
    target.pace.pause = lambda now: 1e6
    target.quorum(plan(8, "second"), together=True)
    gradients(ours, peer.model)
    target.advance(True)
    peer.optimizer.step()
    assert same(ours, peer.model) and target.heal.here == 6


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestRefused("its optimizer is Muon", 404), "the source: its optimizer is Muon"),
        (RequestRefused("as upstream", 500), "the source: as upstream"),
        (RequestRefused("no part of step 7 is offered any more", 400), None),
        (RequestRefused("it is not offered yet", 503), None),
        (CheckpointError("its connection broke"), None),
        (Busy("a part", 0.01), None),
    ],
)
def test_which_errors_end_a_heal_in_passing(
    peer: Peer, start: Any, error: Exception, reason: Optional[str]
) -> None:
    peer.errors.put(error)
    target, _ = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6 or target.heal.abandoned is not None)
    assert target.heal.abandoned == reason
    target.advance(reduced=True)


def test_other_parameters_end_a_heal_in_passing(peer: Peer, start: Any) -> None:
    peer.model = nn.Linear(2, 3)
    peer.optimizer = torch.optim.Adam(peer.model.parameters())
    target, _ = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.abandoned is not None)
    assert target.heal.abandoned == "parameters or optimizers differ from the source's" and not target.wrote


def test_a_difference_ends_a_heal_in_passing(peer: Peer, start: Any) -> None:
    target, ours = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6)
    gradients(ours, peer.model)
    target.advance(reduced=True)
    peer.optimizer.step()
    with torch.no_grad():
        peer.model.bias[1] += 1
    target.quorum(plan(8), together=True)
    until(target, lambda: target.heal.abandoned is not None)
    assert "differ from the source's in step 8, in the elements 0 to 6" in str(target.heal.abandoned)


def test_a_source_that_is_reported_to_have_failed_is_not_waited_for(peer: Peer, start: Any) -> None:
    """A stopped process keeps its connection open, so the request would end at its timeout only."""
    target, ours = start()
    target.quorum(plan(7), together=True)
    assert peer.next() == "part.0.6.0.0"
    until(target, lambda: target.heal.here == 6 and target._request is None)
    peer.decides.clear()
    gradients(ours)
    with ThreadPoolExecutor(1) as pool:
        votes = pool.submit(target.advance, True)
        assert peer.next() == "decision"
        target.peer_failed(MemberFailure(6, "source/0", ""))
        target.peer_failed(MemberFailure(7, "additional/0", ""))
        assert not votes.done(), "these failures are of another quorum, or of another group"
        target.peer_failed(MemberFailure(7, "source/0", ""))
        votes.result(DEADLINE_SEC / 2)
    assert same(ours, peer.model) and target.heal.abandoned is None


def test_a_source_that_has_failed_is_not_asked(peer: Peer, start: Any) -> None:
    target, ours = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6 and target._request is None)
    target.peer_failed(MemberFailure(7, "source/0", ""))
    gradients(ours)
    target.advance(reduced=True)
    assert peer.next() == "part.0.6.0.0" and peer.asked.empty()


def test_requests_wait_for_the_end_of_a_pause(peer: Peer, start: Any) -> None:
    target, _ = start()
    paused = threading.Event()

    def pause(now: float) -> float:
        paused.set()
        return 1e6

    target.pace.pause = pause
    target.quorum(plan(7), together=True)
    target.pace.quorum.assert_called_once()
    target.reduces()
    target.pace.reduces.assert_called_once()
    assert paused.wait(DEADLINE_SEC) and peer.asked.empty()
    target.pace.spent.assert_not_called()
    with target._cond:
        target.pace.pause = lambda now: 0.0
        target._cond.notify_all()
    assert peer.next() == Ask(0, 6, 0, 0).key
    until(target, lambda: target._request is None)
    target.pace.spent.assert_called_once()


def test_a_source_is_located_once_and_not_for_long() -> None:
    """The timeout is short: the other groups continue to train, and the next quorum may name another
    source.
    """
    tried: list[timedelta] = []

    def connect(address: str, timeout: timedelta) -> Any:
        tried.append(timeout)
        raise RuntimeError(f"{address} was not reached")

    with pytest.raises(RuntimeError, match="a host was not reached"):
        Sources(connect, timedelta(seconds=60), lambda: None, MagicMock(), 0).locate("a host")
    assert tried == [timedelta(seconds=3)]


@pytest.fixture
def in_passing(peer: Peer) -> Iterator[tuple[InPassing, Recovery]]:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    transport = MagicMock(in_place=False, recv_part=peer.recv_part, recv_decision=peer.recv_decision)
    ranks = GroupRanks(MagicMock(), "", 0, 1)
    heals = InPassing(
        transport, [optimizer], str, lambda: None, HealingRanks(ranks), DEADLINE_SEC, MagicMock(), 1
    )
    heals.heal_by(HealMode.IN_PASSING)
    others = "user_state", "sources", "planner", "wait", "background", "data", "errors", "logger"
    yield (
        heals,
        Recovery(
            transport=transport,
            optimizers=[],
            in_passing=heals,
            most_sources=1,
            agreement=Agreement(ranks),
            rank_state=RankState(timedelta(seconds=60)),
            **{name: MagicMock() for name in others},
        ),
    )
    peer.answers.set()
    heals.stop()


def test_a_heal_is_notified_of_failures(in_passing: tuple[InPassing, Recovery]) -> None:
    heals, recovery = in_passing
    heals._target = target = MagicMock(wrote=False)
    failure = MemberFailure(3, "source/0", "its connection broke")
    recovery.peer_failed(failure)
    target.peer_failed.assert_called_once_with(failure)


def test_weights_that_were_written_in_passing_are_of_no_step(
    peer: Peer, in_passing: tuple[InPassing, Recovery]
) -> None:
    """The only source fails after the first parts are in place."""
    heals, recovery = in_passing
    alone = cast(Any, SimpleNamespace(heal=False, up_to_date=False, quorum_id=8))
    recovery.begin(plan(7), Position(0, 0, -1), 0.0)
    assert recovery._heal(plan(7), at_once=False) is None and heals.joining
    target = heals._target
    assert target is not None
    wait_until(lambda: target.wrote, DEADLINE_SEC)
    heals.advance(reduced=False)
    with pytest.raises(RuntimeError, match="its weights are of no step"):
        recovery.follow(alone, restores=False)
    recovery.follow(alone, restores=True)  # a copy replaces all of them
    recovery.pending = {"user": {}}
    assert recovery.load(MagicMock())
    recovery.follow(alone, restores=False)
    target._thread.join(DEADLINE_SEC)


def test_if_the_rest_does_not_arrive_the_whole_state_is_fetched(
    peer: Peer, in_passing: tuple[InPassing, Recovery]
) -> None:
    heals, recovery = in_passing
    recovery.begin(plan(7), Position(0, 0, -1), 0.0)
    assert recovery._heal(plan(7), at_once=False) is None
    target = heals._target
    assert target is not None
    target.heal.here = target.heal.same = target.heal._comparable = target.heal.total
    target.heal.applied()
    fetched: list[Any] = []

    def fetch(of: Any, has: Any = None) -> Position:
        fetched.append(has)
        if has is not None:
            raise CheckpointError("the source has ended")
        return Position(of.max_step, 0, 0)

    recovery._fetch = fetch  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="the source has ended"):
        recovery._heal(plan(8), at_once=False)
    assert not heals.joining and heals.join(plan(9), may_write=True) is Fetch.ALL
    assert recovery._heal(plan(9), at_once=False) == Position(9, 0, 0)
    assert fetched == [heals.has, None]
    with pytest.raises(KeyError, match="has ended"):
        heals.has(0, "")
    target._thread.join(DEADLINE_SEC)
