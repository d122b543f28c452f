from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.checkpointing.simulated_device import BLOCK, Simulated
from torchft.checkpointing import _receive, _staging
from torchft.http import _IPv6HTTPServer


@pytest.fixture(autouse=True)
def servers_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look every 0.1 s whether they are to end, and hundreds of them end here."""
    serve = _IPv6HTTPServer.serve_forever
    monkeypatch.setattr(_IPv6HTTPServer, "serve_forever", lambda self, poll_interval: serve(self, 0.005))


@pytest.fixture
def at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target asks a source that failed again without a pause."""
    monkeypatch.setattr(_receive, "_PAUSE", 0.01)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Simulated]]:
    Simulated.made = []
    monkeypatch.setattr(Simulated, "late", 0.002)
    monkeypatch.setitem(_staging.KINDS, "cpu", Simulated)
    monkeypatch.setattr(_staging, "_free", {})
    monkeypatch.setattr(_staging, "BLOCK", BLOCK)
    yield Simulated
    for each in Simulated.made:
        each.close()
