"""Notices of the lighthouse arrive until the Manager ends."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from torchft._manager.quorum import notices
from torchft._manager.quorum.notices import FailureListener
from torchft._torchft import MemberFailure

FAILURE = MemberFailure(1, "group_0:uuid", "its connection broke", 0)


class Notices:
    """A client that returns these notices, or raises them if they are errors."""

    def __init__(self, *notices: Any) -> None:
        self._notices = iter(notices)

    def _wait_notice(self, timeout: timedelta) -> Any:
        notice = next(self._notices)
        if isinstance(notice, Exception):
            raise notice
        return notice


def listen(*notices: Any) -> tuple[FailureListener, list[MemberFailure]]:
    received: list[MemberFailure] = []
    client: Any = Notices(*notices)
    return FailureListener(client, 0, {"failed": received.append}), received


def test_a_notice_that_cannot_be_read_does_not_end_the_failure_bus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "_LISTEN_AGAIN_SEC", 0.0)
    unread = TypeError("an unexpected field")
    listener, received = listen(unread, ("failed", FAILURE), RuntimeError("the client is closed"))
    listener.join()
    assert received == [FAILURE]
    assert "could not be read" in caplog.text and "an unexpected field" in caplog.text
    assert "no more notices of the lighthouse are heard: the client is closed" in caplog.text


def test_the_failure_bus_ends_silently_with_the_manager(caplog: pytest.LogCaptureFixture) -> None:
    closed = threading.Event()

    class Client:
        def _wait_notice(self, timeout: timedelta) -> Any:
            assert closed.wait(10)
            raise RuntimeError("the client is closed")

    client: Any = Client()
    listener = FailureListener(client, 0, {})
    listener.end()
    closed.set()
    listener.join()
    assert not caplog.records
