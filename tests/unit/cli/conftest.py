"""Ports for tests of the commands."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def closed_ports() -> Iterator[list[int]]:
    """Two ports of 127.0.0.1 that refuse connections: sockets are bound to them, and do not listen."""
    with contextlib.ExitStack() as stack:
        bound = [stack.enter_context(socket.socket()) for _ in range(2)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in bound]
