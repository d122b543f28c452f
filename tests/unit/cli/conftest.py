"""Ports and answers for tests of the commands."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def closed_ports() -> Iterator[list[int]]:
    """Two ports of 127.0.0.1 that refuse connections: sockets are bound to them, and do not listen."""
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in bound]


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that sends these bytes to one request and closes the connection; gives its address."""
    with contextlib.ExitStack() as stack:

        def start(answer: bytes) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def serve() -> None:
                with contextlib.suppress(OSError):  # the client may have closed the connection
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(65536)
                        connection.sendall(answer)

            threading.Thread(target=serve, daemon=True).start()
            return f"http://127.0.0.1:{server.getsockname()[1]}"

        yield start
