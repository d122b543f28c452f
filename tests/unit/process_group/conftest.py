"""A store for the groups to meet at, and groups of each kind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from tests.unit.process_group.backends import backends
from tests.unit.process_group.peers import Peers
from tests.unit.process_group.ranks import TIMEOUT
from torchft.process_group import reconfigure

# PyTorch's TCPStore looks up the name of every peer in the DNS, which would cost a test 5 s if an answer is
# lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def unhurried_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections to a store do not have the short timeout of a test; waits in the store have it."""
    monkeypatch.setattr(reconfigure, "TCPStore", lambda **kw: TCPStore(**{**kw, "timeout": TIMEOUT}))


@pytest.fixture(scope="module", params=backends())
def peers(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[Peers]:
    peers = Peers(request.param, store)
    peers.connect()
    yield peers
    peers.shutdown()


@pytest.fixture(params=backends())
def fresh(request: pytest.FixtureRequest, store: TCPStore) -> Iterator[Peers]:
    """Peers that a test may break; not connected."""
    peers = Peers(request.param, store)
    yield peers
    peers.shutdown()
