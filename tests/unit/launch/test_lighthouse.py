"""Free ports for processes that are started later."""

from __future__ import annotations

import socket

import pytest

from torchft.launch import lighthouse
from torchft.launch.lighthouse import free_port


def test_a_free_port_is_outside_the_range_of_outgoing_connections() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300, "a port that was handed out may not be in use yet"
    assert all(port < 32768 for port in ports)


def test_a_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(lighthouse, "_PORTS", [port] * 200)
        assert free_port() != port
