from __future__ import annotations

import pytest

from torchft.checkpointing import _retry
from torchft.http import _IPv6HTTPServer


@pytest.fixture(autouse=True)
def servers_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look every 0.1 s whether they are to end, and hundreds of them end here."""
    serve = _IPv6HTTPServer.serve_forever
    monkeypatch.setattr(_IPv6HTTPServer, "serve_forever", lambda self, poll_interval: serve(self, 0.005))


@pytest.fixture
def at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target asks a source that failed again without a pause."""
    monkeypatch.setattr(_retry, "PAUSE", 0.01)
