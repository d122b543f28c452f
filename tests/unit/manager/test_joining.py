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
from torchft._manager.heal.joining import Target
from torchft._manager.heal.part_server import PartServer, StepParts
from torchft._manager.heal.recovery import Recovery
from torchft._manager.heal.rules import FIRST, NOTHING, Ask
from torchft._manager.heal.together import Agreement, HealingRanks
from torchft._manager.heal.tracked import Parameters
from torchft._manager.rank import Position
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
        decision: what it says of each step; None: it does not answer.
        answers: requests for parts wait until this is set, or until they are aborted.
        decides: the same, for requests for a decision.
    """

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.5)
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.decision: Optional[bool] = None
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
        part = StepParts(*PartServer([self.optimizer]).parameters(), lambda: None).part(key)
        memory(part.value, part.memory.numel()).copy_(part.memory)
        return part

    def recv_decision(
        self, metadata: str, step: int, quorum_id: int, timeout: timedelta, abandon: Abandon
    ) -> bool:
        self.asked.put("decision")
        _held(self.decides, abandon)
        if self.decision is None:
            raise CheckpointError("it does not answer")
        return self.decision

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


@pytest.mark.parametrize("decision", [True, False, None])
def test_a_heal_in_passing(peer: Peer, start: Any, decision: Optional[bool]) -> None:
    """Without a report of the source the gradient is kept until the next quorum, which shows that it was
    committed.
    """
    target, ours = start()
    peer.decision = decision
    target.quorum(plan(7), together=True)
    assert peer.next() == "part.0.6.0.0"
    until(target, lambda: target.heal.here == 6)
    assert same(ours, peer.model) and target.wrote
    gradients(ours, peer.model)
    target.reduces()
    target.advance(reduced=True)
    assert peer.next() == "decision"
    peer.optimizer.step()
    assert same(ours, peer.model) == (decision is True)
    target.quorum(plan(8), together=True)
    assert same(ours, peer.model)
    assert peer.next() == "part.6.6.0.6"
    until(target, lambda: target.heal.ends)
    target.advance(reduced=True)
    if decision is None:
        assert peer.asked.empty(), "a source that did not answer is not asked again"
    assert target.heal.abandoned is None


def test_a_gradient_that_the_training_loop_changes_starts_the_heal_over(peer: Peer, start: Any) -> None:
    """Also if PyTorch increments its version after the gradient was applied."""
    target, ours = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6)
    gradients(ours, peer.model)
    target.advance(reduced=True)
    peer.optimizer.step()
    target.quorum(plan(8), together=True)
    until(target, lambda: target.heal.same == 6)
    for p in ours.parameters():
        p.grad.zero_()  # as zero_grad(set_to_none=False) does while the gradient is applied
    target.advance(reduced=True)
    assert (target.heal.here, target.heal.abandoned) == (0, None)


def test_another_attempt_at_a_step_has_other_hyperparameters(peer: Peer, start: Any) -> None:
    """A scheduler may step although the first attempt failed."""
    target, ours = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6)
    peer.optimizer.param_groups[0]["lr"] = 0.25
    gradients(ours, peer.model)
    target.advance(reduced=True)
    again = plan(7)
    again.quorum_id = 8
    target.quorum(again, together=True)
    target.advance(reduced=True)
    peer.optimizer.step()
    following = plan(8)
    following.committed_quorum_id = 8
    target.quorum(following, together=True)
    assert same(ours, peer.model)


def test_an_optimizer_that_adds_to_its_gradients_is_no_change_by_the_training_loop(
    peer: Peer, start: Any
) -> None:
    target, ours = start()
    for model in (ours, peer.model):
        settings: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "nesterov": True, "foreach": True}
        optimizer = torch.optim.SGD(model.parameters(), **settings)
        if model is ours:
            target.parameters = Parameters([optimizer])
            target._layout = target.parameters.layout()
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


def test_a_step_waits_for_its_first_answer_once(
    peer: Peer, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_FIRST_SEC", 0.05)
    target, _ = start()
    peer.answers.clear()
    target.quorum(plan(7), together=True)
    target.reduces()
    waits: list[float] = []
    wait_for = target._cond.wait_for
    monkeypatch.setattr(
        target._cond, "wait_for", lambda ready, timeout: (waits.append(timeout), wait_for(ready, timeout))[1]
    )
    target.reduces()
    target.advance(reduced=True)
    assert waits[:2] == [0.0, 0.0]
    assert target.heal.abandoned is None


def test_a_part_of_another_size_gets_no_memory(peer: Peer, start: Any) -> None:
    target, _ = start()
    value = {"layout": target._layout, "states": [{}, {}], "hyperparameters": []}
    with pytest.raises(ValueError, match="a part of 1099511627776 bytes in place of 24"):
        target._begin(Ask(0, 6, 0, 0), plan(7), value, 1 << 40)
    assert target._buffer.numel() == 0


def test_a_part_that_is_late_is_of_no_use(peer: Peer, start: Any) -> None:
    target, ours = start()
    before = [p.detach().clone() for p in ours.parameters()]
    target.pace.pause = lambda now: 1e6
    target.quorum(plan(7), together=True)
    assert peer.next() == NOTHING.key  # else the step would wait for the hyperparameters
    until(target, lambda: target._request is None)
    peer.answers.clear()
    with target._cond:
        target.pace.pause = lambda now: 0.0
        target._cond.notify_all()
    assert peer.next() == "part.0.6.0.0"
    target.advance(reduced=True)
    assert target.heal._amount == FIRST // 2
    peer.answers.set()
    until(target, lambda: target._request is None)
    assert target.heal.here == 0 and all(torch.equal(a, b) for a, b in zip(before, ours.parameters()))
    target.quorum(plan(8), together=True)
    until(target, lambda: target.heal.here == 6)
    assert same(ours, peer.model) and target.heal.abandoned is None


def test_a_source_that_fails_is_replaced_by_that_of_the_next_quorum(start: Any, peer: Peer) -> None:
    located: queue.SimpleQueue[str] = queue.SimpleQueue()

    def locate(address: str) -> str:
        located.put(address)
        if address == "first":
            raise RuntimeError(f"{address} was not reached")
        return address

    target, _ = start(locate)
    target.quorum(plan(7, "first"), together=True)
    until(target, lambda: target._gave_up)
    assert [located.get() for _ in range(located.qsize())] == 4 * ["first"]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(target.reduces).result(DEADLINE_SEC / 4)  # nothing waits for it
        pool.submit(target.advance, True).result(DEADLINE_SEC / 4)
    target.quorum(plan(8, "second"), together=True)
    until(target, lambda: target.heal.here == 6)
    assert peer.next() == "second: part.0.6.0.0"
    assert target.heal.abandoned is None


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


@pytest.mark.parametrize("waits_for", ["first answer", "decision"])
def test_a_source_that_is_reported_to_have_failed_is_not_waited_for(
    peer: Peer, start: Any, waits_for: str
) -> None:
    """A stopped process keeps its connection open, so the request would end at its timeout only."""
    target, ours = start()
    if waits_for == "first answer":
        peer.answers.clear()
    target.quorum(plan(7), together=True)
    assert peer.next() == "part.0.6.0.0"
    if waits_for == "decision":
        until(target, lambda: target.heal.here == 6 and target._request is None)
        peer.decides.clear()
    gradients(ours)
    with ThreadPoolExecutor(1) as pool:
        votes = pool.submit(target.advance, True)
        if waits_for == "decision":
            assert peer.next() == "decision"
        target.peer_failed(6, "source/0")
        target.peer_failed(7, "additional/0")
        assert not votes.done(), "these failures are of another quorum, or of another group"
        target.peer_failed(7, "source/0")
        votes.result(DEADLINE_SEC / 2)
    assert bool(target._kept) == (waits_for == "decision")
    assert target.heal.abandoned is None


def test_a_source_that_has_failed_is_not_asked(peer: Peer, start: Any) -> None:
    target, ours = start()
    target.quorum(plan(7), together=True)
    until(target, lambda: target.heal.here == 6 and target._request is None)
    target.peer_failed(7, "source/0")
    gradients(ours)
    target.advance(reduced=True)
    assert peer.next() == "part.0.6.0.0" and peer.asked.empty()
    assert target._kept


def test_only_the_first_request_of_a_step_does_not_wait_for_the_end_of_a_pause(
    peer: Peer, start: Any
) -> None:
    """It has no part then: other groups may wait for its answer, which has the hyperparameters."""
    target, _ = start()
    paused = threading.Event()

    def pause(now: float) -> float:
        paused.set()
        return 1e6

    target.pace.pause = pause
    target.quorum(plan(7), together=True)
    target.pace.quorum.assert_called_once()
    assert peer.next() == NOTHING.key
    target.reduces()
    target.pace.reduces.assert_called_once()
    paused.clear()
    with target._cond:
        target._cond.notify_all()
    assert paused.wait(DEADLINE_SEC)
    assert peer.asked.empty()
    target.pace.spent.assert_not_called()
    with target._cond:
        target.pace.pause = lambda now: 0.0
        target._cond.notify_all()
    assert peer.next() == Ask(0, 6, 0, 0).key
    until(target, lambda: target._request is None)
    target.pace.spent.assert_called_once()


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
    """The timeout is short: the other groups continue to train, and the next quorum may name another
    source.
    """
    tried: list[timedelta] = []

    def connect(address: str, timeout: timedelta) -> Any:
        tried.append(timeout)
        raise RuntimeError(f"{address} was not reached")

    with pytest.raises(RuntimeError, match="a host was not reached"):
        recovery_of(connect).locate("a host")
    assert tried == [timedelta(seconds=3)]


def test_a_heal_is_notified_of_failures() -> None:
    recovery = recovery_of(MagicMock())
    recovery.in_passing = MagicMock()
    recovery.peer_failed(MemberFailure(3, "source/0", "its connection broke"))
    recovery.in_passing.peer_failed.assert_called_once_with(3, "source/0")


@pytest.fixture
def in_passing(peer: Peer) -> Iterator[tuple[InPassing, Recovery]]:
    recovery = recovery_of(MagicMock())
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    transport = MagicMock(recv_part=peer.recv_part, recv_decision=peer.recv_decision)
    ranks = HealingRanks(MagicMock(), "", 0, 1)
    recovery.in_passing = made = InPassing(
        transport, [optimizer], str, lambda: None, ranks, DEADLINE_SEC, MagicMock()
    )
    yield made, recovery
    peer.answers.set()
    made.stop()


def test_weights_that_were_written_in_passing_are_of_no_step(
    peer: Peer, in_passing: tuple[InPassing, Recovery]
) -> None:
    """The only source fails after the first parts are in place."""
    heals, recovery = in_passing
    alone = cast(Any, SimpleNamespace(heal=False, up_to_date=False, quorum_id=8))
    recovery.begin(plan(7), Position(0, 0, -1), 0.0)
    assert recovery.heal(plan(7), at_once=False) is None and recovery.joining
    target = heals._target
    assert target is not None
    wait_until(lambda: target.wrote, DEADLINE_SEC)
    heals.advance(reduced=False)
    with pytest.raises(RuntimeError, match="its weights are of no step"):
        recovery.follow(alone, restores=False)
    recovery.follow(alone, restores=True)  # a copy replaces all of them
    recovery.pending = {"user": {}}
    assert recovery.load()
    recovery.follow(alone, restores=False)
    target._thread.join(DEADLINE_SEC)


def test_if_the_rest_does_not_arrive_the_whole_state_is_fetched(
    peer: Peer, in_passing: tuple[InPassing, Recovery]
) -> None:
    heals, recovery = in_passing
    recovery.begin(plan(7), Position(0, 0, -1), 0.0)
    assert recovery.heal(plan(7), at_once=False) is None
    target = heals._target
    assert target is not None
    target.heal.here = target.heal.same = target.heal._comparable = target.heal.total
    target.heal.keep()
    fetched: list[Any] = []

    def fetch(of: Any, has: Any = None) -> Position:
        fetched.append(has)
        if has is not None:
            raise CheckpointError("the source has ended")
        return Position(of.max_step, 0, 0)

    recovery._fetch = fetch  # type: ignore[method-assign]
    target._hyperparameters[7] = target.parameters.hyperparameters()
    with pytest.raises(CheckpointError, match="the source has ended"):
        recovery.heal(plan(8), at_once=False)
    assert not recovery.joining and heals.join(plan(9), may_write=True) is Fetch.ALL
    assert recovery.heal(plan(9), at_once=False) == Position(9, 0, 0)
    assert fetched == [heals.has, None]
    with pytest.raises(KeyError, match="has ended"):
        heals.has(0, "")
    target._thread.join(DEADLINE_SEC)
