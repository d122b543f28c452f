"""Free ports for processes that are started later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchft.launch import lighthouse
from torchft.launch.lighthouse import free_port


def test_a_free_port_is_outside_the_range_of_outgoing_connections() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300, "a port that was handed out may not be in use yet"
    assert all(port < 32768 for port in ports)


def test_a_folder_of_sources_does_not_hide_the_package_from_the_lighthouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a clone after `pip install .`."""
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with lighthouse.lighthouse(tmp_path / "log", ["--min_replicas", "1"]) as address:
        assert address.startswith("http://127.0.0.1:")


def test_a_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(lighthouse, "_PORTS", [port] * 200)
        assert free_port() != port
