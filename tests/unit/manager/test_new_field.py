"""The Manager sends each field of the quorum request, and its plan uses each field of the answer.

docs/internals/changes.md lists the other files that pass these fields on.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.test_plan import plan, result
from torchft._torchft import QuorumRequest, QuorumResult

# Fields of the answer that a plan does not use, and the reason.
NOT_PLANNED = {"commit_failures": "each group counts its own"}


def test_the_manager_sends_each_field_of_the_request(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[dict[str, Any]] = []

    def request(**given: Any) -> QuorumRequest:
        requests.append(given)
        return QuorumRequest(**given)

    monkeypatch.setattr("torchft._manager.stepping.QuorumRequest", request)
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    assert {*requests[0]} == {field.name for field in fields(QuorumRequest)}


def test_a_plan_uses_each_field_of_the_answer() -> None:
    used: set[str] = set()

    class Watched(QuorumResult):
        def __getattribute__(self, name: str) -> Any:
            used.add(name)
            return super().__getattribute__(name)

    for use_async_quorum in (True, False):
        plan(Watched(**vars(result())), use_async_quorum=use_async_quorum)
    names = {field.name for field in fields(QuorumResult)}
    assert names - used == {*NOT_PLANNED}
