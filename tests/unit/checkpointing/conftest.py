from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.client import retry
from torchft.http import _IPv6HTTPServer

TIMEOUT = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def servers_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes servers check for shutdown every 5 ms; the default of 0.1 s is too slow for the hundreds of
    servers here.
    """
    serve = _IPv6HTTPServer.serve_forever
    monkeypatch.setattr(_IPv6HTTPServer, "serve_forever", lambda self, poll_interval: serve(self, 0.005))


@pytest.fixture
def at_once_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes targets retry a failed source without a pause."""
    monkeypatch.setattr(retry, "PAUSE", 0.01)


@pytest.fixture
def make() -> Iterator[Callable[..., HTTPTransport[Any]]]:
    """Makes transports and shuts them down."""
    made: list[HTTPTransport[Any]] = []

    def make_one(timeout: timedelta = TIMEOUT, num_chunks: int = 0, **kwargs: Any) -> HTTPTransport[Any]:
        made.append(HTTPTransport(timeout, num_chunks, **kwargs))
        return made[-1]

    yield make_one
    for transport in made:
        transport.shutdown()


@pytest.fixture
def source(make: Callable[..., HTTPTransport[Any]]) -> HTTPTransport[Any]:
    return make()


@pytest.fixture
def target(make: Callable[..., HTTPTransport[Any]]) -> HTTPTransport[Any]:
    return make()
