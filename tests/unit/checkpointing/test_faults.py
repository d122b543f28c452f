"""Transfers over connections that are dropped, delayed, truncated, reset or corrupted: no data is missing or
wrong.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from tests.unit.checkpointing.checkpoint_states import assert_same
from tests.unit.checkpointing.faulty_proxy import Fault, Proxy, random_faults
from tests.unit.waiting import wait_until
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client import sources
from torchft.checkpointing.native import core
from torchft.checkpointing.transport import CheckpointError, CheckpointTimeout

TIMEOUT = timedelta(seconds=20)
MB = 1 << 20


class Wire:
    """A source, and the proxies in front of its two ports."""

    def __init__(self, source: HTTPTransport[Any], http: list[Fault], data: list[Fault]) -> None:
        self.http = Proxy(urlsplit(source.metadata()).port or 0, http)
        server = source._native
        assert server.start()
        self._server, self._port = server, server.port
        self.data = Proxy(server.port, data)
        server.port = self.data.port  # the port in its tickets
        self.metadata = f"http://localhost:{self.http.port}/checkpoint/"

    def close(self) -> None:
        self._server.port = self._port
        self.http.close()
        self.data.close()


@pytest.fixture
def wire(source: HTTPTransport[Any]) -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []

    def make(http: list[Fault] | None = None, data: list[Fault] | None = None) -> Wire:
        made.append(Wire(source, http or [], data or []))
        return made[-1]

    yield make
    for one in made:
        one.close()


def random_state(rng: random.Random) -> dict[str, torch.Tensor]:
    sizes = [rng.choice([0, 1, 100, 5000, 70_000, 600_000]) for _ in range(rng.randrange(1, 12))]
    return {f"t{i}": torch.randint(-128, 128, (size,), dtype=torch.int8) for i, size in enumerate(sizes)}


few_or_many = pytest.mark.parametrize("transfers", [8, pytest.param(200, marks=pytest.mark.slow)])


@pytest.mark.timeout(600)
@few_or_many
def test_random_transfers(source: HTTPTransport[Any], transfers: int) -> None:
    seed = random.randrange(2**32)
    struck = failed = 0
    for number in range(transfers):
        rng = random.Random(seed + number)
        state = random_state(rng)
        nbytes = sum(t.numel() for t in state.values())
        # A garbled request may name another step or part and be refused; then an error is correct.
        flips = rng.random() < 0.2
        http = random_faults(rng, ["drop", "reset", "truncate", "delay"] + ["flip"] * flips, 2000, 2)
        data = random_faults(rng, ["drop", "reset", "truncate", "delay", "flip"], max(1, nbytes // 2), 6)
        source.send_checkpoint([1], number, state, TIMEOUT)
        wire = Wire(source, http, data)
        target: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
        try:
            got = target.recv_checkpoint(0, wire.metadata, number, TIMEOUT)
        except (CheckpointError, CheckpointTimeout):  # a garbled end of the headers makes both sides wait
            failed += 1
            assert any(fault.kind == "flip" for fault in wire.http.done), f"seed {seed}, transfer {number}"
        else:
            assert_same(got, state)
        finally:
            struck += len(wire.http.done) + len(wire.data.done)
            wire.close()
            target.shutdown()
            source.disallow_checkpoint()
    assert struck > transfers / 2, f"seed {seed}: too few faults occurred"
    assert failed < transfers / 2, f"seed {seed}"


@pytest.mark.timeout(600)
@few_or_many
def test_random_transfers_with_an_additional_source(
    source: HTTPTransport[Any], monkeypatch: pytest.MonkeyPatch, transfers: int
) -> None:
    """An additional source has partly different data and faulty connections, and sometimes withdraws its
    offer during the transfer.
    """
    monkeypatch.setattr(sources, "_HELP_AFTER", 0.0)
    seed = random.randrange(2**32)
    for number in range(transfers // 4):
        rng = random.Random(seed + number)
        state = random_state(rng)
        nbytes = max(1, sum(t.numel() for t in state.values()))
        faults = [
            random_faults(rng, ["drop", "reset", "truncate", "delay", "flip"], nbytes, 4) for _ in range(2)
        ]
        source.send_checkpoint([1], number, state, TIMEOUT)
        offered = {
            name: t.clone() if rng.random() < 0.7 else torch.full_like(t, 77) for name, t in state.items()
        }
        additional: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
        additional.help_checkpoint(number, offered)
        target: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0)
        wires = [Wire(source, [], faults[0]), Wire(additional, [], faults[1])]
        away = threading.Timer(rng.random() * 0.05, additional.disallow_checkpoint)
        if rng.random() < 0.5:
            away.start()
        try:
            got = target.recv_checkpoint(
                0, wires[0].metadata, number, TIMEOUT, additional_sources=[lambda w=wires[1]: w.metadata]
            )
            assert_same(got, state)
        except Exception as error:
            raise AssertionError(f"seed {seed}, transfer {number}") from error
        finally:
            away.cancel()
            for wire in wires:
                wire.close()
            target.shutdown()
            additional.shutdown()
            source.disallow_checkpoint()


def test_a_source_that_continued_with_another_step(target: Any) -> None:
    """The source needed its memory during the transfer, so it has a later step when the target
    retries.
    """
    state = large_state()
    later = {"w0": state["w0"][:1000]}
    # slow enough that most data is missing when its step changes
    source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0, bandwidth_limit=8 * MB)
    source.send_checkpoint([1], 1, state, TIMEOUT)
    through = Wire(source, [], [Fault("reset", MB, True)])

    def turn() -> None:
        wait_until(lambda: len(through.data.done) > 0)
        source._source.disallow(0.0)
        for tensor in state.values():
            tensor.fill_(7)
        source.send_checkpoint([1], 2, later, TIMEOUT)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match=r"step 1 .*serving step 2 but got step=1"):
            target.recv_checkpoint(0, through.metadata, 1, TIMEOUT)
        thread.join(20)
        assert_same(target.recv_checkpoint(0, source.metadata(), 2, TIMEOUT), later)
    finally:
        thread.join(20)
        through.close()
        source.shutdown()


def large_state() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.randn(2 * MB) for i in range(4)}


@pytest.mark.parametrize("kind", ["drop", "reset", "truncate"])
def test_a_transfer_continues_after_a_lost_connection(source: Any, target: Any, wire: Any, kind: str) -> None:
    state = large_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    # Each of the four connections, one of which transfers at least a quarter of the 32 MB.
    through = wire(data=[Fault(kind, 2 * MB, True) for _ in range(4)])
    assert_same(target.recv_checkpoint(0, through.metadata, 1, TIMEOUT), state)
    assert through.data.done


@pytest.mark.parametrize("kind", ["reset", "truncate"])
@pytest.mark.usefixtures("at_once_again")
def test_a_stream_of_the_upstream_format_restarts(
    source: Any, target: Any, wire: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Without the native library; the connection is reset, or closed in the middle of the data."""
    state = large_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    through = wire(http=[Fault(kind, 2 * MB, True)])
    monkeypatch.setattr(core, "native", lambda: None)
    assert_same(target.recv_checkpoint(0, through.metadata, 1, TIMEOUT), state)
    assert len(through.http.done) == 1


def test_the_control_connection_is_lost(source: Any, target: Any, wire: Any, monkeypatch: Any) -> None:
    """The data connections end with it. The transfer continues with a new ticket, and is not restarted."""
    from torchft.checkpointing.client import transfer

    made = []
    original = transfer.NativeFetch
    monkeypatch.setattr(
        transfer, "NativeFetch", lambda *args, **kwargs: made.append(1) or original(*args, **kwargs)
    )
    state = large_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    through = wire()
    cut = threading.Event()
    handler = source._server.RequestHandlerClass
    await_end = handler._await_end

    def cut_once(self: Any, grant: Any) -> None:
        if cut.is_set():
            await_end(self, grant)
            return
        cut.set()
        deadline = time.monotonic() + 10
        while grant.served == 0:
            assert time.monotonic() < deadline
        # as if the connection had ended

    monkeypatch.setattr(handler, "_await_end", cut_once)
    assert_same(target.recv_checkpoint(0, through.metadata, 1, TIMEOUT), state)
    assert cut.is_set() and made == [1]


def test_flipped_bits_are_fetched_again(source: Any, target: Any, wire: Any) -> None:
    state = large_state()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    # On each of the four connections, one of which transfers at least a quarter of the 32 MB.
    through = wire(data=[Fault("flip", MB + 13 * i, True, bit=i) for i in range(4)])
    assert_same(target.recv_checkpoint(0, through.metadata, 1, TIMEOUT), state)
    assert through.data.done


@pytest.mark.slow  # tests/unit/checkpointing/native/test_core.py
def test_a_source_that_fails_half_way_is_named(source: Any, target: Any, wire: Any) -> None:
    source.send_checkpoint([1], 1, large_state(), TIMEOUT)
    through = wire(
        data=[Fault("reset", MB, True)] * 2 + [Fault("reset", 0, True)] * 99,
        http=[Fault("delay", 0, True)] + [Fault("reset", 0, False)] * 9,
    )
    with pytest.raises(CheckpointError, match=f"step 1 .*{through.metadata}"):
        target.recv_checkpoint(0, through.metadata, 1, TIMEOUT)


def test_a_source_whose_memory_changes_is_noticed(source: Any, target: Any) -> None:
    """For example, a training loop writes before disallow_checkpoint, so that two reads of the memory
    differ.
    """
    state = {"w": torch.zeros(8 * MB)}
    source.send_checkpoint([1, 2], 1, state, TIMEOUT)
    assert_same(target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT), state)
    state["w"][5] = 1
    with pytest.raises(CheckpointError, match="wrong checksum"):
        target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)


def test_a_transfer_from_a_silent_source_can_be_aborted(
    source: HTTPTransport[Any], target: HTTPTransport[Any]
) -> None:
    """The connections of a stopped host stay open, so the transfer has to be aborted from outside."""
    silent = socket.create_server(("localhost", 0))  # the kernel accepts connections, and no answer follows
    raised: list[BaseException] = []

    def receive() -> None:
        try:
            target.recv_checkpoint(0, f"http://localhost:{silent.getsockname()[1]}/checkpoint/", 1, TIMEOUT)
        except Exception as e:
            raised.append(e)

    receiver = threading.Thread(target=receive, daemon=True)
    began = time.monotonic()
    with silent:
        receiver.start()
        connection, _ = silent.accept()
        with connection:
            target.abandon_receiving(RuntimeError("the source has failed"))
            receiver.join(TIMEOUT.total_seconds() / 2)
    assert not receiver.is_alive() and time.monotonic() - began < TIMEOUT.total_seconds() / 2
    assert isinstance(raised[0], CheckpointError) and "the source has failed" in str(raised[0])
    source.send_checkpoint([0], 1, {"x": torch.ones(3)}, TIMEOUT)  # the next transfer is not affected
    assert torch.equal(target.recv_checkpoint(0, source.metadata(), 1, TIMEOUT)["x"], torch.ones(3))
