"""Transfers between two transports of torchft, over the native core."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import socket
import sys
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.promises import ABORT_S, within
from tests.unit.checkpointing.checkpoint_states import assert_same, into, training_state
from tests.unit.waiting import wait_until
from torchft._torchft import _load
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client import sources
from torchft.checkpointing.client.progress import TransferProgress, describe
from torchft.checkpointing.codec import encoding
from torchft.checkpointing.codec.stream import read_object
from torchft.checkpointing.codec.token import checkpoint_token
from torchft.checkpointing.native import core
from torchft.checkpointing.source import server
from torchft.checkpointing.transport import CheckpointError
from torchft.http import _DeadlineSocket

TIMEOUT = timedelta(seconds=20)
MB = 1 << 20


@pytest.fixture
def make() -> Iterator[Callable[..., HTTPTransport[Any]]]:
    made: list[HTTPTransport[Any]] = []

    def make_one(timeout: timedelta = TIMEOUT, **kwargs: Any) -> HTTPTransport[Any]:
        made.append(HTTPTransport(timeout, 0, **kwargs))
        return made[-1]

    yield make_one
    for transport in made:
        transport.shutdown()


def model(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((1000, 700), value),
        "t": torch.full((3, 5), value).T,
        "p": torch.nn.Parameter(torch.full((5,), value)),
        "step": value,
        "list": [torch.full((), value), OrderedDict(a=torch.full((2,), value, dtype=torch.float64))],
    }


def tensors(state: Any) -> list[torch.Tensor]:
    return [state["w"], state["t"], state["p"], state["list"][0], state["list"][1]["a"]]


# In place


def test_tensors_are_received_in_place(make: Any) -> None:
    source, own = make(), model(0.0)
    source.send_checkpoint([1], 1, model(1.0), TIMEOUT)
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
    assert_same(got, model(1.0))
    for mine, theirs in zip(tensors(own), tensors(got)):
        assert mine is theirs
    assert own["step"] == 0.0 and got["step"] == 1.0


def test_keys_of_any_kind_name_a_place(make: Any) -> None:
    own = {(1, "a"): torch.zeros(5), torch.float16: torch.zeros(2), b"x": {2**70: torch.zeros(7)}}
    state = {(1, "a"): torch.arange(5.0), torch.float16: torch.ones(2), b"x": {2**70: torch.full((7,), 3.0)}}
    source = make()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
    assert_same(got, state)
    assert got[1, "a"] is own[1, "a"] and got[torch.float16] is own[torch.float16]
    assert got[b"x"][2**70] is own[b"x"][2**70]


def test_tensors_with_another_layout_are_copied_to_their_place(make: Any) -> None:
    """Local tensors with other strides, with shared memory, or that are part of a larger tensor."""
    base = torch.zeros(10, 10)
    own = {"a": torch.zeros(4, 6).T, "b": base[2:4], "c": base[5:], "d": torch.zeros(3)}
    big = torch.arange(30.0)
    theirs = {
        "a": torch.arange(24.0).reshape(6, 4),
        "b": torch.ones(2, 10),
        "c": torch.full((5, 10), 2.0),
        "d": big[3:6],
    }
    source = make()
    source.send_checkpoint([1], 1, theirs, TIMEOUT)
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
    for name in own:
        assert got[name] is own[name] and torch.equal(own[name], theirs[name])
    assert base[:2].sum() == 0 and base[4].sum() == 0


def test_tensors_that_are_not_here_are_allocated(make: Any) -> None:
    source, own = make(), {"model": {"w": torch.zeros(3)}}
    source.send_checkpoint([1], 1, {"model": {"w": torch.ones(3)}, "optim": {0: torch.ones(2)}}, TIMEOUT)
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
    assert got["model"]["w"] is own["model"]["w"] and got["optim"][0].tolist() == [1, 1]


@pytest.mark.parametrize(
    "own",
    [
        {"a": torch.zeros(3), "b": torch.zeros(2)},
        {"a": torch.zeros(2).int(), "b": torch.zeros(2)},
        {"a": torch.zeros(2), "c": [torch.zeros(2)]},
        {"a": [torch.zeros(2)]},
    ],
)
def test_only_tensors_that_fit_are_filled(make: Any, own: Any) -> None:
    source, state = make(), {"a": torch.ones(2), "b": torch.ones(2)}
    before = {key: value.clone() for key, value in own.items() if isinstance(value, torch.Tensor)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, target=into(own))
    assert_same(got, state)
    for key, value in before.items():
        assert torch.equal(own[key], value) or got[key] is own[key]


# Settings


def test_without_checksums(make: Any) -> None:
    source = make()
    source.send_checkpoint([1], 1, training_state(), TIMEOUT)
    assert_same(make(checksum=False).recv_checkpoint(0, source.metadata(), 1, TIMEOUT), training_state())


def test_the_bandwidth_is_limited(make: Any) -> None:
    source = make(bandwidth_limit=20 * MB)
    source.send_checkpoint([1], 1, {"w": torch.ones(2 * MB)}, TIMEOUT)
    start = time.monotonic()
    make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert time.monotonic() - start > 0.3


@pytest.mark.skipif(sys.platform != "linux", reason="the threads of a process are looked up in Linux's /proc")
@pytest.mark.parametrize("background", [False, True])
def test_serving_in_the_background(make: Any, background: bool) -> None:
    def idle_threads() -> int:
        idle = 0
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                idle += os.sched_getscheduler(int(thread)) == os.SCHED_IDLE
        return idle

    seen: list[int] = []
    # The thread of a background stream (SCHED_IDLE) ends with the stream. Go's first thread cannot end: if a
    # stream of another test ran on it, it now sleeps with this policy.
    before = idle_threads()
    source = make(background=background, bandwidth_limit=100 * MB)
    state = {"large": torch.ones(10 * MB), "rest": training_state()}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    with ThreadPoolExecutor() as pool:
        healed = pool.submit(make().recv_checkpoint, 0, source.metadata(), 1, TIMEOUT)
        while not healed.done():
            seen.append(idle_threads())
            time.sleep(0.001)
    assert (max(seen) > before) == background
    assert_same(healed.result(), state)


def test_bad_settings(make: Any) -> None:
    with pytest.raises(ValueError, match="bandwidth_limit is -1: allowed are bytes a second, and 0"):
        make(bandwidth_limit=-1)


def test_the_first_address_that_answers_is_taken(make: Any) -> None:
    source = make(hosts=["host.invalid", "::1", "localhost"])
    assert "http://host.invalid:" in source.metadata() and "also=%3A%3A1,localhost/" in source.metadata()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    assert make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"a": 1}
    with pytest.raises(CheckpointError, match=r"host\.invalid"):
        make().recv_checkpoint(
            0, source.metadata().replace("also=%3A%3A1,localhost", "also=gone.invalid"), 1, TIMEOUT
        )


def test_an_upstream_peer_uses_the_first_address(make: Any) -> None:
    source = make(hosts=["localhost", "host.invalid"])
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    with urllib.request.urlopen(f"{source.metadata()}1/full", timeout=10) as response:
        assert read_object(response, "the state") == {"a": 1}


# Tokens


def test_a_token_is_required(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.write_text("secret\n")
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(ours))
    source = make()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    assert make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"a": 1}
    # The proof is derived from the token, and is not the token itself.
    for token in ("", "guess", "sécret", "secret"):
        request = f"GET /checkpoint/1/full HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n"
        with socket.create_connection(("localhost", source._server.server_port), timeout=10) as sock:
            sock.sendall(request.encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 401"), token
    # the data port requires the secret of the ticket, and without the token a target gets no ticket
    with monkeypatch.context() as patch:
        patch.setattr("torchft.checkpointing.client.request.checkpoint_token", lambda: "guess")
        with pytest.raises(CheckpointError, match="refused with 401: a request for a checkpoint must prove"):
            make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    # while the token is replaced, the file lists both tokens: proofs of both are accepted
    shown = checkpoint_token()
    ours.write_text("new\nsecret\n")
    assert checkpoint_token() != shown
    assert make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"a": 1}
    with monkeypatch.context() as patch:
        patch.setattr("torchft.checkpointing.client.request.checkpoint_token", lambda: shown)
        assert make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"a": 1}
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"TORCHFT_TOKEN_FILE='.*missing' cannot be read"):
        make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)


# Several sources


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes targets ask additional sources from the beginning, not only in long transfers."""
    monkeypatch.setattr(sources, "_HELP_AFTER", 0.0)


def test_several_groups_serve(make: Any, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{i}": torch.randn(MB) for i in range(4)}
    # slow enough that the transfer does not end before the additional source is asked
    assigned, additional = make(bandwidth_limit=2 * MB), make()
    assigned.send_checkpoint([1], 1, {k: v.clone() for k, v in state.items()}, TIMEOUT)
    additional.help_checkpoint(1, {k: v.clone() for k, v in state.items()})
    served: list[int] = []
    handler = assigned._server.RequestHandlerClass
    await_end = handler._await_end

    def note(self: Any, grant: Any) -> None:
        try:
            await_end(self, grant)
        finally:
            served.append(grant.served)

    monkeypatch.setattr(handler, "_await_end", note)
    got = make().recv_checkpoint(0, assigned.metadata(), 1, TIMEOUT, additional_sources=[additional.metadata])
    assert_same(got, state)
    wait_until(lambda: len(served) == 2)
    assert all(n > 0 for n in served) and sum(served) >= 16 * MB


def test_an_additional_source_takes_its_memory_back_at_once(make: Any, at_once: None) -> None:
    """The additional source trains on while the target reads. The target gets the rest from the assigned
    source.
    """
    state = {"w": torch.randn(4 * MB)}
    assigned, additional = (make(bandwidth_limit=10 * MB) for _ in range(2))
    assigned.send_checkpoint([1], 1, {"w": state["w"].clone()}, TIMEOUT)
    weights = state["w"].clone()
    additional.help_checkpoint(1, {"w": weights})
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(
            make().recv_checkpoint,
            0,
            assigned.metadata(),
            1,
            TIMEOUT,
            additional_sources=[additional.metadata],
        )
        wait_until(lambda: additional._source._readers > 0)
        time.sleep(0.2)
        begin = time.monotonic()
        additional.disallow_checkpoint()
        assert time.monotonic() - begin < within(ABORT_S)  # a source waits for its targets until its timeout
        weights.fill_(0)
        assert_same(got.result(60), state)


def test_an_additional_source_that_cannot_be_reached_is_not_waited_for(make: Any, at_once: None) -> None:
    source = make()
    source.send_checkpoint([1], 1, {"w": torch.ones(5)}, TIMEOUT)
    over = threading.Event()
    try:
        got = make().recv_checkpoint(
            0, source.metadata(), 1, TIMEOUT, additional_sources=[lambda: str(over.wait(30))]
        )
        assert_same(got, {"w": torch.ones(5)})
        assert not over.is_set()
    finally:
        over.set()


@pytest.mark.parametrize("additional", ["another structure", "another step", "no server", "garbage"])
def test_useless_additional_sources(make: Any, additional: str, at_once: None) -> None:
    state = {"w": torch.randn(MB)}
    source, other = make(bandwidth_limit=16 * MB), make()
    source.send_checkpoint([1], 1, state, TIMEOUT)
    metadata = other.metadata()
    if additional == "another structure":
        other.send_checkpoint([1], 1, {"w": torch.randn(5)}, TIMEOUT)
    elif additional == "another step":
        other.send_checkpoint([1], 2, state, TIMEOUT)
    elif additional == "no server":
        other.shutdown()
    else:
        metadata = "nonsense"
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, additional_sources=[lambda: metadata])
    assert_same(got, state)


def test_an_additional_source_that_differs_sends_only_equal_blocks(make: Any, at_once: None) -> None:
    source, other = make(bandwidth_limit=30 * MB), make()
    state = {f"w{i}": torch.randn(MB) for i in range(3)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    other.send_checkpoint(
        [1], 1, {**{k: v.clone() for k, v in state.items()}, "w1": torch.randn(MB)}, TIMEOUT
    )
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, additional_sources=[other.metadata])
    assert_same(got, state)


def test_data_of_the_assigned_source_only_is_requested_again(
    make: Any, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The assigned source is cut off when the additional source has sent all data that is equal on both."""
    source, other = make(bandwidth_limit=8 * MB), make()
    state = {"alike": torch.randn(2 * MB), "only here": torch.randn(MB)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    other.send_checkpoint([1], 1, {"alike": state["alike"].clone(), "only here": torch.randn(MB)}, TIMEOUT)
    grants: list[core.Grant] = []
    grant = core.NativeOffer.grant
    monkeypatch.setattr(core.NativeOffer, "grant", lambda self: grants.append(grant(self)) or grants[-1])
    handler, cut = source._server.RequestHandlerClass, threading.Event()
    await_end = handler._await_end

    def cut_once(self: Any, grant: Any) -> None:
        if cut.is_set() or self.server is not source._server:
            await_end(self, grant)
            return
        cut.set()
        wait_until(lambda: len(grants) == 2 and grants[1].served > MB)  # as if the connection had ended

    monkeypatch.setattr(handler, "_await_end", cut_once)
    got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT, additional_sources=[other.metadata])
    assert cut.is_set()
    assert_same(got, state)


# Consistency


def test_the_source_continues_to_train(make: Any) -> None:
    """Every step changes all tensors. No target reads a mixture of two steps."""
    source = make()
    state = {f"w{i}": torch.zeros(MB) for i in range(4)}
    done, steps, healed = threading.Event(), [0], []
    source.send_checkpoint([1], 0, state, TIMEOUT)

    def heal_on() -> None:
        target = make()
        while not done.is_set():
            step = steps[0]
            try:
                got = target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
            except CheckpointError:
                continue  # the source is at a later step
            assert all(bool((t == step).all()) for t in got.values())
            healed.append(step)

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(heal_on) for _ in range(2)]
        for step in range(1, 15):
            time.sleep(0.02)
            source.disallow_checkpoint()
            for tensor in state.values():
                tensor.fill_(step)
            source.send_checkpoint([1], step, state, TIMEOUT)
            steps[0] = step
        try:
            wait_until(lambda: len(healed) > 3 or any(reader.done() for reader in readers))
        finally:
            done.set()
        for reader in readers:
            reader.result(30)


# The end of a transfer, as the source sees it


class Served:
    """A grant that has served the next one of the given numbers of bytes at each call, and then one more each
    time. `then` runs at the last given one.
    """

    def __init__(self, counts: list[int], then: Callable[[], object] = lambda: None) -> None:
        self._counts = counts
        self._then = then
        self._last = 0

    @property
    def served(self) -> int:
        if not self._counts:  # on a busy machine the time may pass once more
            self._last += 1
            return self._last
        self._last = self._counts.pop(0)
        if not self._counts:
            self._then()
        return self._last


@pytest.fixture
def control() -> Iterator[tuple[Any, socket.socket]]:
    """A handler that waits for the end of a transfer, for 50 ms without progress, and the target's socket."""
    here, target = socket.socketpair()
    handler = object.__new__(server._Handler)
    handler.connection = _DeadlineSocket.wrap(here)
    handler.rfile = handler.connection.makefile("rb")
    handler.server = SimpleNamespace(wait_timeout=0.05)  # type: ignore[assignment]
    with target, handler.connection, handler.rfile:
        yield handler, target


def test_a_transfer_may_take_longer_than_the_timeout_while_it_advances(control: Any) -> None:
    handler, target = control
    ended = threading.Event()
    grant = Served([1, 2, 3], then=lambda: ended.set() or target.shutdown(socket.SHUT_WR))
    handler._await_end(grant)
    assert ended.is_set()


def test_a_transfer_that_does_not_advance_is_ended(control: Any) -> None:
    counts = [1, 2, 2, 3]
    control[0]._await_end(Served(counts))
    assert counts == [3]


# Memory and threads


def test_no_memory_and_threads_are_left(make: Any) -> None:
    go = _load()
    gc.collect()
    before = go.pyapi_Handles()
    source, target = make(), make()
    for step in range(5):
        source.send_checkpoint([1], step, {"w": torch.ones(1000)}, TIMEOUT)
        target.recv_checkpoint(0, source.metadata(), step, TIMEOUT)
        source.disallow_checkpoint()
    for transport in (source, target):
        transport.shutdown()
    gc.collect()
    # Objects that other tests dropped may end in the meantime.
    wait_until(lambda: go.pyapi_Handles() <= before)
    assert not core._registered


def test_no_memory_at_the_target(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    source.send_checkpoint([1], 1, {"w": torch.ones(5)}, TIMEOUT)

    def refuse(nbytes: int, **kwargs: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(encoding.torch, "zeros", refuse)
        with pytest.raises(CheckpointError, match="no memory for a tensor of 20 bytes"):
            make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert_same(
        make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), {"w": torch.ones(5)}
    )  # the source still works


def test_ctrl_c_ends_a_transfer_before_its_memory_is_freed(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(bandwidth_limit=4 * MB)
    source.send_checkpoint([1], 1, {"w": torch.ones(4 * MB)}, TIMEOUT)

    def interrupt(self: TransferProgress, received: int, total: int) -> None:
        assert received < total and core._registered
        raise KeyboardInterrupt

    monkeypatch.setattr(TransferProgress, "update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert not core._registered


def test_a_deadline_ends_a_transfer(make: Any) -> None:
    source = make(bandwidth_limit=MB)
    source.send_checkpoint([1], 1, {"w": torch.ones(4 * MB)}, TIMEOUT)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"step 1 .* timed out after \d+\.\d seconds"):
        make().recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=0.5))
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 2


def test_an_unauthenticated_connection_at_the_data_port(make: Any) -> None:
    source = make()
    source.send_checkpoint([1], 1, {"w": torch.ones(MB)}, TIMEOUT)
    assert source._native.start()
    port = source._native.port
    unauthenticated = [socket.create_connection(("localhost", port), timeout=10) for _ in range(5)]
    for sock, data in zip(
        unauthenticated, (b"", b"\x00" * 1000, b"tftheal1" + b"x" * 16, b"GET / HTTP/1.1\r\n\r\n", b"tft")
    ):
        sock.sendall(data)
    assert_same(make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT), {"w": torch.ones(MB)})
    start = time.monotonic()
    source.disallow_checkpoint()
    assert time.monotonic() - start < TIMEOUT.total_seconds() / 2
    for sock in unauthenticated:
        sock.close()


# Progress


def test_progress_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    now = [0.0]
    lines = TransferProgress("heal", logging.getLogger("test"), clock=lambda: now[0])
    for _ in range(100):
        now[0] += 0.1
        lines.update(int(now[0] * 1e8), 10**9)
    assert 1 <= len(re.findall("heal: 0.5 of 1.0 GB, 0.10 GB/s, 5 s left", caplog.text)) <= 2
    assert describe(0, 10**9, 3.0) == "0.0 of 1.0 GB, 0.00 GB/s, no data yet"


def test_the_end_is_logged(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source = make()
    source.send_checkpoint([1], 1, {"w": torch.ones(MB)}, TIMEOUT)
    make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
    assert re.search(
        r"checkpoint of step 1 .*: 0.004 GB in [\d.]+ s, [\d.]+ GB/s, digest [0-9a-f]{32}", caplog.text
    )
