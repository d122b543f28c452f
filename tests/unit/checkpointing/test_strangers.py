"""Connections without a valid request do not count against a checkpoint server's limit for peers."""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Callable, Iterator

import pytest
import torch

from torchft.checkpointing import HTTPTransport, _native_transfer
from torchft.http import _IPv6HTTPServer

TIMEOUT = timedelta(seconds=30)
AT_ONCE = _IPv6HTTPServer.max_connections + 50
EACH_SEC = 1 / 200


@pytest.fixture
def make() -> Iterator[Callable[[], HTTPTransport]]:
    made: list[HTTPTransport] = []

    def transport() -> HTTPTransport:
        made.append(HTTPTransport(timeout=TIMEOUT, num_chunks=0))
        return made[-1]

    yield transport
    for each in made:
        each.shutdown()


@contextlib.contextmanager
def strangers(port: int, data: bytes) -> Iterator[None]:
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
def test_strangers_do_not_delay_a_heal(
    data: bytes, native: bool, monkeypatch: pytest.MonkeyPatch, make: Callable[[], HTTPTransport]
) -> None:
    if not native:
        monkeypatch.setattr(_native_transfer, "native", lambda: None)
    source = make()
    state = {"weights": torch.randn(100_000)}
    source.send_checkpoint([1], 1, state, TIMEOUT)
    with strangers(source._server.server_port, data):
        for _ in range(3):
            got = make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT)
            assert torch.equal(got["weights"], state["weights"])
        assert len(source._server._strangers) <= source._server.max_strangers


def test_strangers_do_not_delay_a_heal_with_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], HTTPTransport]
) -> None:
    (tmp_path / "token").write_text("s" * 40)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "token"))
    source = make()
    source.send_checkpoint([1], 1, {"step": 1}, TIMEOUT)
    with strangers(source._server.server_port, b"GET /checkpoint/1/full HTTP/1.1\r\n\r\n"):
        assert make().recv_checkpoint(0, source.metadata(), 1, TIMEOUT) == {"step": 1}
        assert len(source._server._admitted) <= 1, "only the target's connection, which may be about to close"
