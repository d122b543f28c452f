"""Parts of a state: a source's answers during and between its steps, and the target's reactions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Optional

import pytest
import torch

from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client.request import Abandon, RequestRefused
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.codec.requests import StatePart, parse
from torchft.checkpointing.source import publisher as source_module
from torchft.checkpointing.source.publisher import Publisher
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout

TIMEOUT = timedelta(seconds=20)
SIZE = 1 << 20


class Number:
    """A source whose state is a number: all bytes of its parts."""

    def __init__(self, state: int, whole: Callable[[], None] = lambda: None) -> None:
        self.state = state
        self.whole = whole

    def part(self, key: str) -> StatePart:
        if key == "part.large":
            return StatePart(
                key, torch.full((64 << 20,), self.state, dtype=torch.uint8)
            )  # more than a connection buffers
        if key not in ("part.some", "part.none"):
            raise ValueError(f"there is no {key}")
        return StatePart(
            {"of": key}, torch.full((SIZE if key == "part.some" else 0,), self.state, dtype=torch.uint8)
        )


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a request waits at the source."""
    began, wait_for = threading.Event(), threading.Condition.wait_for

    def noted(
        self: threading.Condition, predicate: Callable[[], Any], timeout: Optional[float] = None
    ) -> Any:
        if timeout == TIMEOUT.total_seconds() and not predicate():
            began.set()
        return wait_for(self, predicate, timeout)

    monkeypatch.setattr(source_module.threading.Condition, "wait_for", noted)
    return began


def ask(
    target: HTTPTransport[Any],
    source: HTTPTransport[Any],
    step: int,
    key: str = "part.some",
    timeout: timedelta = TIMEOUT,
    abandon: Optional[Abandon] = None,
) -> StatePart:
    def memory(value: Any, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    return target.recv_part(source.metadata(), step, key, timeout, memory, abandon or Abandon())


def test_a_part_is_of_its_step(
    source: HTTPTransport[Any], target: HTTPTransport[Any], waits: threading.Event
) -> None:
    source.offer_parts(7, Number(7))
    part = ask(target, source, 7)
    assert part.value == {"of": "part.some"} and torch.equal(
        part.memory, torch.full((SIZE,), 7, dtype=torch.uint8)
    )
    assert ask(target, source, 7, "part.none").memory.numel() == 0
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(ask, target, source, 8)
        assert waits.wait(20), "the source has not begun that step"
        source.offer_parts(8, Number(8))
        assert following.result(20).memory[0] == 8
    with pytest.raises(RequestRefused, match="no part of step 7 is offered any more") as refused:
        ask(target, source, 7)
    assert refused.value.status == 400


@pytest.mark.parametrize("ends", ["decision", "disallow"])
def test_between_two_steps_nothing_is_read(
    source: HTTPTransport[Any], target: HTTPTransport[Any], ends: str
) -> None:
    source.offer_parts(7, Number(7))
    source.note_decision(7, 1, True) if ends == "decision" else source.disallow_checkpoint()
    with pytest.raises(RequestRefused, match="no part of step 7"):
        ask(target, source, 7)


def test_no_part_is_read_once_the_step_is_decided() -> None:
    """A request that waits for another one to be read does not delay the training thread."""
    source = Publisher(keep=60)
    reads, goes_on = threading.Event(), threading.Event()
    read: list[str] = []

    class Slow(Number):
        def part(self, key: str) -> StatePart:
            read.append(key)
            reads.set()
            assert goes_on.wait(20)
            return super().part("part.none")

    source.open(7, Slow(7))
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(source.part, 7, "first", 20.0)
        assert reads.wait(20)
        others = [pool.submit(source.part, 7, "another", 20.0)]
        decided = pool.submit(source.decide, 7, 1, True)
        while source._parts is not None:
            pass
        goes_on.set()
        assert first.result(20).value == {"of": "part.none"}
        decided.result(20)
        for other in others:
            with pytest.raises(source_module.WrongStep):
                other.result(20)
    assert read == ["first"]


@pytest.mark.parametrize(
    ("attempt", "known"), [((7, 3), True), ((7, 2), None), ((6, 3), None), ((8, 1), False)]
)
def test_a_decision_is_returned_once_it_is_known(
    source: HTTPTransport[Any],
    target: HTTPTransport[Any],
    waits: threading.Event,
    attempt: tuple[int, int],
    known: Optional[bool],
) -> None:
    """None: this source was not in that attempt, or has decided on a later one since."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(target.recv_decision, source.metadata(), *attempt, TIMEOUT, Abandon())
        assert waits.wait(20)
        source.note_decision(7, 3, True)
        if known is False:
            source.note_decision(8, 1, False)
        assert answer.result(20) is known


@pytest.mark.parametrize("key", ["part.", "part.other", "decision.x"])
def test_invalid_requests_are_refused(
    source: HTTPTransport[Any], target: HTTPTransport[Any], key: str
) -> None:
    source.offer_parts(7, Number(7))
    with pytest.raises(RequestRefused) as refused:
        ask(target, source, 7, key)
    assert refused.value.status == 404


def test_a_source_that_gives_no_parts_says_why_at_once(
    source: HTTPTransport[Any], target: HTTPTransport[Any]
) -> None:
    source.refuse_parts(7, "its optimizer is Muon")
    with pytest.raises(RequestRefused, match="its optimizer is Muon") as refused:
        ask(target, source, 7)
    assert refused.value.status == 404


def test_a_target_that_cannot_take_parts_is_refused(
    source: HTTPTransport[Any], target: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source.offer_parts(7, Number(7))
    monkeypatch.setattr(source._server.native, "start", lambda: False)
    with pytest.raises(RequestRefused, match="by the native core only"):
        ask(target, source, 7)


@pytest.mark.parametrize("what", ["part", "decision"])
def test_shutdown_of_a_source_ends_waiting_requests(
    target: HTTPTransport[Any], waits: threading.Event, what: str
) -> None:
    source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
    source.prepare_parts(dict)
    with ThreadPoolExecutor(1) as pool:
        answer: Future[Any] = (
            pool.submit(ask, target, source, 7)
            if what == "part"
            else pool.submit(target.recv_decision, source.metadata(), 7, 1, TIMEOUT, Abandon())
        )
        assert waits.wait(20)
        source.shutdown()
        with pytest.raises(CheckpointError):
            answer.result(20)


def test_a_request_ends_at_its_timeout_and_by_an_abort(
    source: HTTPTransport[Any], target: HTTPTransport[Any], waits: threading.Event
) -> None:
    with pytest.raises(CheckpointTimeout):
        ask(target, source, 7, timeout=timedelta(milliseconds=50))
    waits.clear()
    abandon = Abandon()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, target, source, 7, abandon=abandon)
        assert waits.wait(20)
        abandon.because(CheckpointError("the step has ended"))
        with pytest.raises(CheckpointError, match="the step has ended"):
            answer.result(20)


def test_an_error_of_the_target_ends_the_transfer(
    source: HTTPTransport[Any], target: HTTPTransport[Any]
) -> None:
    def memory(value: Any, nbytes: int) -> torch.Tensor:
        raise ValueError("its parameters differ")

    source.offer_parts(7, Number(7))
    with pytest.raises(ValueError, match="its parameters differ"):
        target.recv_part(source.metadata(), 7, "part.some", TIMEOUT, memory, Abandon())


def test_a_slow_target_delays_neither_the_training_nor_another_target(
    source: HTTPTransport[Any], target: HTTPTransport[Any]
) -> None:
    """Parts are sent from a copy, and no lock is held meanwhile."""
    source.offer_parts(7, Number(7))
    begun, goes_on = threading.Event(), threading.Event()

    def memory(value: Any, nbytes: int) -> torch.Tensor:
        begun.set()
        assert goes_on.wait(20)
        return torch.empty(nbytes, dtype=torch.uint8)

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(target.recv_part, source.metadata(), 7, "part.large", TIMEOUT, memory, Abandon())
        assert begun.wait(20)
        assert ask(target, source, 7).memory[0] == 7
        source.disallow_checkpoint()
        source.offer_parts(8, Number(8))
        assert ask(target, source, 8).memory[0] == 8
        goes_on.set()
        assert torch.equal(slow.result(20).memory, torch.full((64 << 20,), 7, dtype=torch.uint8))


def test_the_whole_state_is_offered_when_a_target_requests_it(
    source: HTTPTransport[Any], target: HTTPTransport[Any]
) -> None:
    """Also in each attempt at a step: the copy of an earlier one may have been dropped."""
    offered: list[int] = []

    def whole(step: int) -> None:
        offered.append(step)
        source.send_checkpoint([1], step, {"w": torch.full((4,), float(step))}, TIMEOUT)

    for step in (7, 7, 8):
        source.offer_parts(step, Number(step, lambda step=step: whole(step)))  # type: ignore[misc]
        assert len(offered) < 3
        for _ in range(2):
            assert target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)["w"][0] == step
        source.disallow_checkpoint()
    assert offered == [7, 7, 8]


def test_what_a_target_has_is_left_out(source: HTTPTransport[Any], target: HTTPTransport[Any]) -> None:
    theirs, mine = torch.arange(float(SIZE)), torch.arange(float(SIZE))
    names = {theirs.untyped_storage().data_ptr(): (3, "exp_avg")}
    source.prepare_parts(lambda: names)
    state = {"big": theirs, "view": theirs[5:9], "rest": torch.ones(7), "step": 4}
    source.send_checkpoint([1], 7, state, TIMEOUT)

    def has(number: int, key: str) -> torch.UntypedStorage:
        return {(3, "exp_avg"): mine.untyped_storage()}[number, key]

    asked = TargetState(dict, writable=False, has=has)
    received = target.recv_checkpoint(0, source.metadata(), 7, TIMEOUT, target=asked)
    assert received["big"].data_ptr() == mine.data_ptr() and torch.equal(received["view"], mine[5:9])
    assert torch.equal(received["rest"], torch.ones(7)) and received["step"] == 4
    complete = target.recv_checkpoint(0, source.metadata(), 7, TIMEOUT)
    assert torch.equal(complete["big"], theirs) and complete["big"].data_ptr() not in (
        theirs.data_ptr(),
        mine.data_ptr(),
    )
    names.update({theirs.untyped_storage().data_ptr(): (4, "")})
    source.disallow_checkpoint()
    source.send_checkpoint([1], 8, state, TIMEOUT)
    with pytest.raises(CheckpointError, match=r"region 0 is left out: KeyError\(\(4, ''\)\)"):
        target.recv_checkpoint(0, source.metadata(), 8, TIMEOUT, target=asked)


def test_the_keys_of_requests() -> None:
    assert parse("/checkpoint/7/part.1.2.3.4") == (7, "part.1.2.3.4")
