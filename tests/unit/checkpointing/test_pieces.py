"""Parts of a state over HTTP: a source's answers during and between its steps, and the target's reactions."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.unit.checkpointing.forged_source import server_that_sends
from tests.unit.waiting import wait_until
from torchft.checkpointing import HTTPTransport, _pieces, http_transport
from torchft.checkpointing._http_client import Refused
from torchft.checkpointing._pacer import Pacer
from torchft.checkpointing._pieces import Asker, Window
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout

TIMEOUT = timedelta(seconds=20)


class Source:
    """Serves the bytes of its state, which is a number."""

    def __init__(self, state: int) -> None:
        self.state = state
        self.wholes = 0

    def give(self, kind: str, argument: str) -> tuple[Any, list[torch.Tensor]]:
        if kind not in ("piece", "rest"):
            raise ValueError(f"kind {kind!r}")
        return {"of": argument}, [torch.full((5,), self.state, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)]

    def whole(self) -> None:
        self.wholes += 1


@pytest.fixture
def source() -> Iterator[HTTPTransport[Any]]:
    transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
    transport.prepare_pieces()
    yield transport
    transport.shutdown()


@pytest.fixture
def asker(source: HTTPTransport[Any]) -> Iterator[Asker]:
    asker = Asker(source.metadata(), "", TIMEOUT.total_seconds())
    yield asker
    asker.close()


@pytest.fixture
def request_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a request waits at the source."""
    waits, wait = threading.Event(), Window._wait

    def wait_and_report(self: Window, condition: Callable[[], bool], timeout: float) -> None:
        if not condition():
            waits.set()  # with the window's lock, so that no event ends the wait before it has begun
        wait(self, condition, timeout)

    monkeypatch.setattr(Window, "_wait", wait_and_report)
    return waits


def test_parts_are_marked_with_their_step(source: HTTPTransport[Any], asker: Asker) -> None:
    for step in (7, 8):
        source.note_step(step, {"lr": step})
        source.offer_pieces(step, Source(step))
        answer = asker.ask("piece", "0-0-5")
        assert (answer.step, answer.value, answer.memory.tolist()) == (step, {"of": "0-0-5"}, [step] * 5)
        source.disallow_checkpoint()
    assert asker.ask("head", "7").value == {"lr": 7}, "also after its step"


def test_between_two_steps_nothing_is_read(
    source: HTTPTransport[Any], asker: Asker, request_waits: threading.Event
) -> None:
    source.offer_pieces(7, Source(7))
    source.disallow_checkpoint()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asker.ask, "piece", "0-0-5")
        assert request_waits.wait(20)
        source.offer_pieces(8, Source(8))
        assert answer.result(20).step == 8


def test_the_rest_of_a_past_step_is_none_at_once(
    source: HTTPTransport[Any], asker: Asker, request_waits: threading.Event
) -> None:
    """The target waits for the answer within the step, and the next step begins after that, so waiting would
    deadlock.
    """
    source.offer_pieces(7, Source(7))
    assert asker.ask("rest", "7").memory.tolist() == [7] * 5
    source.disallow_checkpoint()
    answer = asker.ask("rest", "7")
    assert (answer.step, answer.value) == (7, None)
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(asker.ask, "rest", "8")
        assert request_waits.wait(20)
        source.offer_pieces(8, Source(8))
        assert later.result(20).memory.tolist() == [8] * 5


def test_the_head_of_a_step_that_a_source_was_not_in_is_none_at_once(
    source: HTTPTransport[Any], asker: Asker, request_waits: threading.Event
) -> None:
    source.note_step(8, {"lr": 8})
    assert asker.ask("head", "7").value is None
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asker.ask, "head", "9")
        assert request_waits.wait(20)
        source.note_step(9, {"lr": 9})
        assert answer.result(20).value == {"lr": 9}


@pytest.mark.parametrize(
    ("decided", "value"), [((7, 3, True), True), ((7, 3, False), False), ((7, 4, True), None), ((8, 4, True), None)]
)
def test_a_decision_is_returned_once_it_is_known(
    source: HTTPTransport[Any],
    asker: Asker,
    request_waits: threading.Event,
    decided: tuple[int, int, bool],
    value: Any,
) -> None:
    """None means that only a later attempt is known."""
    source.note_decision(6, 3, True)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asker.ask, "decision", "7-3")
        assert request_waits.wait(20)
        source.note_decision(*decided)
        assert answer.result(20).value is value


def test_no_part_is_read_once_the_step_is_decided() -> None:
    """The training thread waits for the copy in progress, and not for those of the requests behind it."""
    window = Window(Pacer())
    window.used = True
    with ThreadPoolExecutor(1) as pool:

        class Decided(Source):
            def give(self, kind: str, argument: str) -> tuple[Any, list[torch.Tensor]]:
                decisions.append(pool.submit(window.decide, 7, 3, True))
                wait_until(lambda: window._closing, 20)
                return super().give(kind, argument)

        decisions: list[Future[None]] = []
        window.open(7, Decided(7))
        window.answer("piece/0-0-5", 1.0)
        decisions[0].result(20)
        with pytest.raises(TimeoutError):
            window.answer("piece/0-0-5", 0.0)


def test_old_heads_are_dropped(source: HTTPTransport[Any], asker: Asker) -> None:
    for step in range(100):
        source.note_step(step, step)
    assert asker.ask("head", "99").value == 99
    assert asker.ask("head", "20").value is None


@pytest.mark.parametrize(
    ("kind", "argument", "reason"), [("digits", "1", "kind 'digits'"), ("head", "x", "no such part: head/x")]
)
def test_invalid_parts_are_refused(
    source: HTTPTransport[Any], asker: Asker, kind: str, argument: str, reason: str
) -> None:
    source.offer_pieces(7, Source(7))
    with pytest.raises(Refused, match=f"404: no such part: .*{reason}|404: {reason}"):
        asker.ask(kind, argument)


def test_a_source_without_the_setting_refuses_at_once() -> None:
    transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
    asker = Asker(transport.metadata(), "", 20.0)
    try:
        with pytest.raises(Refused, match="this source gives its state as a whole"):
            asker.ask("piece", "0-0-5")
    finally:
        asker.close()
        transport.shutdown()


def test_shutdown_of_a_source_ends_waiting_requests(
    source: HTTPTransport[Any], asker: Asker, request_waits: threading.Event
) -> None:
    source.note_step(1, {})
    asker.ask("head", "1")  # opens the connection
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asker.ask, "piece", "0-0-5")
        assert request_waits.wait(20)
        source.shutdown(wait=False)
        with pytest.raises(CheckpointError):
            answer.result(20)


def test_a_request_ends_at_its_timeout_and_by_an_abort(source: HTTPTransport[Any]) -> None:
    asker = Asker(source.metadata(), "", 0.2)
    with pytest.raises(CheckpointTimeout, match=r"piece 0-0-5 from .*timed out after 0.2 s"):
        asker.ask("piece", "0-0-5")
    asker = Asker(source.metadata(), "", 20.0)
    source.note_step(1, {})
    asker.ask("head", "1")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(asker.ask, "piece", "0-0-5")
        asker.abort()
        with pytest.raises(CheckpointError):
            answer.result(20)


def test_the_whole_state_is_offered_when_a_target_requests_it() -> None:
    window, giver = Window(Pacer()), Source(7)
    window.open(7, giver)
    window.want_whole(6)
    assert giver.wholes == 0, "another step"
    window.want_whole(7)
    window.want_whole(7)
    assert giver.wholes == 1
    window.close()
    after = [Source(step) for step in range(8, 11)]
    window.open(8, after[0])
    assert after[0].wholes == 0, "no target asked for this step: a copy of the state would be useless"
    window.close()
    window.want_whole(8)  # too late: it is offered with the next step, once
    for step, later in enumerate(after[1:], start=9):
        window.open(step, later)
        window.close()
    assert [giver.wholes for giver in after] == [0, 1, 0]


def test_the_whole_state_is_offered_in_each_attempt_at_a_step() -> None:
    """The copy of an earlier attempt may have been dropped."""
    window = Window(Pacer())
    for giver in (Source(7), Source(7)):
        window.open(7, giver)
        window.want_whole(7)
        window.note_whole(7)
        window.close()
        assert giver.wholes == 1


def test_a_target_may_request_the_whole_state_before_the_next_attempt_at_its_step() -> None:
    window = Window(Pacer())
    window.open(7, Source(7))
    window.note_whole(7)
    window.close()
    window.want_whole(7)
    again, after = Source(7), Source(8)
    for step, giver in ((7, again), (8, after)):
        window.open(step, giver)
        window.close()
    assert (again.wholes, after.wholes) == (1, 0)


@pytest.mark.parametrize("early", [False, True])
def test_a_state_that_a_target_has_received_as_a_whole_is_not_offered_again(
    source: HTTPTransport[Any], early: bool
) -> None:
    """At step 0 the state is offered as a whole without a request. If a group joins in the next step, a copy of the
    state would be useless.
    """
    state = {"weights": torch.ones(4)}
    target: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
    try:
        with ThreadPoolExecutor(1) as pool:
            if not early:
                source.send_checkpoint([1], 0, state, TIMEOUT)
            received = pool.submit(target.recv_checkpoint, 0, source.metadata(), 0, TIMEOUT)
            if early:
                wait_until(lambda: source._window._wants_whole == 0, 20)
                source.send_checkpoint([1], 0, state, TIMEOUT)
            assert torch.equal(received.result(20)["weights"], state["weights"])
    finally:
        target.shutdown()
    source.disallow_checkpoint()
    giver = Source(1)
    source.offer_pieces(1, giver)
    assert giver.wholes == 0


@pytest.mark.parametrize("damage", ["a bit of the memory", "a bit of the JSON", "sizes", "short", "long"])
def test_an_answer_that_is_damaged_is_an_error(monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    window = Window(Pacer())
    window.used = True
    window.open(7, Source(7))
    body = bytearray(b"".join(bytes(view) for view in window.answer("piece/0-0-5", 1.0)))
    if damage == "a bit of the memory":
        body[-1] ^= 1
    elif damage == "a bit of the JSON":
        body[body.index(b"step") + len('step":')] ^= 1  # the number is another one then
    elif damage == "sizes":
        monkeypatch.setattr(_pieces, "_digests", lambda memory: [[-1, 0], [6, 0]])
        body = bytearray(b"".join(bytes(view) for view in window.answer("piece/0-0-5", 1.0)))
        monkeypatch.undo()
    elif damage == "short":
        del body[-1]
    else:
        body[0] = 0x7F  # the length of the JSON
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with server_that_sends(bytes(answer)) as metadata:
        asker = Asker(metadata, "", 20.0)
        with pytest.raises(CheckpointError, match=r"damaged|ends early|an answer of"):
            asker.ask("piece", "0-0-5")


def test_a_slow_target_delays_neither_the_training_nor_another_target(source: HTTPTransport[Any], asker: Asker) -> None:
    """No lock is held while an answer is sent."""
    sends = threading.Event()

    class Large(Source):
        def give(self, kind: str, argument: str) -> tuple[Any, list[torch.Tensor]]:
            if argument != "large":
                return super().give(kind, argument)
            sends.set()
            return None, [torch.zeros(64 << 20, dtype=torch.uint8)]  # more than a connection buffers

    source.offer_pieces(7, Large(7))
    with socket.create_connection(("localhost", source._server.server_port), 10) as stalled:
        stalled.sendall(b"GET /checkpoint/along/piece/large HTTP/1.1\r\n\r\n")
        assert sends.wait(10)
        assert stalled.recv(1), "its answer has begun"
        assert asker.ask("piece", "0-0-5").step == 7
        source.disallow_checkpoint()
        source.offer_pieces(8, Large(8))
        assert asker.ask("piece", "0-0-5").step == 8


def test_a_target_connects_again_after_a_long_step(
    source: HTTPTransport[Any], asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source closes a connection that was idle for too long."""
    assert _pieces._IDLE_SEC < http_transport._REQUEST_TIMEOUT
    monkeypatch.setattr(_pieces, "_IDLE_SEC", 0.0)
    source.offer_pieces(7, Source(7))
    assert asker.ask("piece", "0-0-5").step == 7
    for connection in list(source._server._connections):
        connection.abort()
    wait_until(lambda: not source._server._connections, 20)
    assert asker.ask("piece", "0-0-5").step == 7
