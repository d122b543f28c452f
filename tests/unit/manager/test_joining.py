"""The thread of a group that heals in pieces, and the source that it asks."""

from __future__ import annotations

import queue
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from torchft._manager.joining import _Target
from torchft._manager.recovery import Recovery
from torchft._manager.tracked import Parameters

DEADLINE_SEC = 20


def plan(step: int, source: str) -> Any:
    return SimpleNamespace(
        max_step=step, quorum_id=step, committed_quorum_id=step - 1, source=SimpleNamespace(manager_address=source)
    )


def test_a_source_that_fails_is_left_for_that_of_the_next_quorum() -> None:
    located: queue.SimpleQueue[str] = queue.SimpleQueue()

    def locate(address: str) -> str:
        located.put(address)
        raise RuntimeError(f"{address} was not reached")

    parameters = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    target = _Target(parameters, locate, timeout=DEADLINE_SEC, logger=MagicMock())
    try:
        target.quorum(plan(7, "first"))
        assert located.get(timeout=DEADLINE_SEC) == "first"
        target.quorum(plan(8, "second"))
        while (address := located.get(timeout=DEADLINE_SEC)) != "second":
            assert address == "first"
        assert target.heal.gave_up is None
    finally:
        target.stop()
        target._thread.join(DEADLINE_SEC)
    assert not target._thread.is_alive()


def test_a_source_that_was_left_during_a_request_is_no_failure() -> None:
    """Not even one that refuses: the next source may not."""
    asked, answer = queue.SimpleQueue[str](), queue.SimpleQueue[Exception]()

    def locate(address: str) -> str:
        asked.put(address)
        raise answer.get(timeout=DEADLINE_SEC)

    parameters = Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    target = _Target(parameters, locate, timeout=DEADLINE_SEC, logger=MagicMock())
    try:
        target.quorum(plan(7, "first"))
        assert asked.get(timeout=DEADLINE_SEC) == "first"
        target.quorum(plan(8, "second"))
        answer.put(RuntimeError("first was not reached"))
        assert asked.get(timeout=DEADLINE_SEC) == "second"
        assert not target.heal.failing
    finally:
        answer.put(RuntimeError("the test is over"))
        target.stop()
        target._thread.join(DEADLINE_SEC)


def test_a_source_is_located_once_and_not_for_long() -> None:
    """The others train on: an attempt with a long timeout would still run when another source has been named."""
    tried: list[timedelta] = []

    def connect(address: str, timeout: timedelta) -> Any:
        tried.append(timeout)
        raise RuntimeError(f"{address} was not reached")

    recovery = Recovery(
        transport=cast(Any, MagicMock(in_place=False)),
        user_state=MagicMock(),
        group_rank=0,
        connect=connect,
        check_peers=lambda: None,
        timeout=timedelta(seconds=60),
        connect_timeout=timedelta(seconds=60),
        sources=1,
        in_background=True,
        logger=MagicMock(),
    )
    with pytest.raises(RuntimeError, match="a host was not reached"):
        recovery.locate("a host")
    assert tried == [timedelta(seconds=3)]
