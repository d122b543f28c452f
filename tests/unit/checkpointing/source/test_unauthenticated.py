"""A checkpoint server's limits: connections without a valid request do not count as peers, and peers wait for
a busy server.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.client import HTTPResponse
from pathlib import Path

import pytest
import torch

from tests.unit.waiting import wait_until
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.native import core
from torchft.checkpointing.transport import CheckpointError
from torchft.http import _IPv6HTTPServer

TIMEOUT = timedelta(seconds=30)
AT_ONCE = _IPv6HTTPServer.max_connections + 50
EACH_SEC = 1 / 200
Make = Callable[[], HTTPTransport]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[HTTPTransport] = []

    def transport() -> HTTPTransport:
        made.append(HTTPTransport(timeout=TIMEOUT, num_chunks=0))
        return made[-1]

    yield transport
    for each in made:
        each.shutdown()


@contextlib.contextmanager
def unauthenticated(port: int, data: bytes) -> Iterator[None]:
    """Opens more connections than a server accepts, then 200 more per second, and closes none."""
    kept: list[socket.socket] = []
    over = threading.Event()

    def come() -> None:
        with contextlib.suppress(OSError):  # the server has closed the connection already
            kept.append(socket.create_connection(("localhost", port), timeout=5))
            kept[-1].sendall(data)

    def go_on() -> None:
        while not over.wait(EACH_SEC):
            come()

    for _ in range(AT_ONCE):
        come()
    more = threading.Thread(target=go_on)
    more.start()
    try:
        yield
    finally:
        over.set()
        more.join(30)
        for sock in kept:
            sock.close()


@pytest.mark.parametrize("native", [True, False], ids=["native", "upstream"])
@pytest.mark.parametrize("data", [b"", b"GET /checkpoint/1/full HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_unauthenticated_connections_do_not_delay_a_heal(
    data: bytes, native: bool, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    if not native:
        monkeypatch.setattr(core, "native", lambda: None)
    source = make()
    state = {"weights": torch.randn(100_000)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    with unauthenticated(source._server.server_port, data):
        for _ in range(3):
            got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
            assert torch.equal(got["weights"], state["weights"])
        assert len(source._server._pending) <= source._server.max_pending


def test_unauthenticated_connections_do_not_delay_a_heal_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make
) -> None:
    (tmp_path / "token").write_text("s" * 40)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "token"))
    source = make()
    source.send_checkpoint([1], 1, {"step": 1}, TIMEOUT)
    with unauthenticated(source._server.server_port, b"GET /checkpoint/1/full HTTP/1.1\r\n\r\n"):
        assert make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"step": 1}
        assert len(source._server._admitted) <= 1, "only the target's connection, which may be about to close"


def connect(source: HTTPTransport) -> socket.socket:
    return socket.create_connection(("localhost", source._server.server_port), timeout=30)


def test_targets_wait_for_a_busy_source(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_IPv6HTTPServer, "max_connections", 2)
    source = make()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    kept = [connect(source) for _ in range(2)]
    for sock in kept:
        sock.sendall(b"GET /checkpoint/1/full HTTP/1.1\r\n\r\n")
        assert sock.recv(9) == b"HTTP/1.1 "
    with pytest.raises(CheckpointError, match=r"the source has too many connections; retry after 1 s"):
        make().recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=0.5))

    with ThreadPoolExecutor(8) as pool:
        targets = [pool.submit(make().recv_checkpoint, 0, source.metadata(), 1, TIMEOUT) for _ in range(8)]
        wait_until(lambda: source._server._full)
        for sock in kept:
            sock.close()
        assert [target.result(60) for target in targets] == [{"a": 1}] * 8
    assert 1 <= sum("max_connections" in record.message for record in caplog.records) < 10


def test_a_busy_source_is_no_progress(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a target whose timeout is one of progress would wait for ever."""
    monkeypatch.setattr(_IPv6HTTPServer, "max_connections", 0)
    source = make()
    source.send_checkpoint([1], 1, {"a": 1}, TIMEOUT)
    waited_for = TargetState(dict, writable=True, waited_for=True)
    with pytest.raises(CheckpointError, match="too many connections"):
        make().recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=1.5), target=waited_for)


def test_a_connection_that_is_cut_before_its_request_is_told_to_retry(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_IPv6HTTPServer, "pending_of_one", 1)
    source = make()
    with connect(source) as early, connect(source), HTTPResponse(early) as response:
        response.begin()
        assert (response.status, response.getheader("Retry-After")) == (503, "0")
