"""A late failure belongs to the step in which its operation began; the next step may have other peers and
tensors.
"""

from __future__ import annotations

import threading
from typing import Any, Callable

import pytest
import torch

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.contended import Contended
from torchft._torchft import QuorumResult

Quorum = Callable[..., QuorumResult]


@pytest.fixture
def aborts(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the aborts of the process group."""
    seen: list[str] = []
    monkeypatch.setattr(fixture.pg, "abort", lambda: seen.append("abort"))
    return seen


def test_a_future_that_fails_in_the_next_step_is_not_its_error(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    late: torch.futures.Future[int] = torch.futures.Future()
    wrapped = manager.wrap_future(late, 2)
    assert manager.should_commit()
    manager.start_quorum()
    late.set_exception(RuntimeError("of the previous step"))
    assert wrapped.wait() == 2
    assert manager.errored() is None and manager.should_commit()


def test_a_future_that_fails_in_a_replay_is_an_error_of_the_step(
    fixture: Fixture, make_quorum: Quorum
) -> None:
    """A replay is another attempt at the same step, and the future belongs to that step."""
    manager = fixture.manager(replay_failed_step=True)
    late: torch.futures.Future[int] = torch.futures.Future()
    manager.start_quorum()
    wrapped = manager.wrap_future(late, 2)
    manager._begin_round(manager._current.request, replays=True)
    late.set_exception(RuntimeError("of the first attempt"))
    assert wrapped.wait() == 2
    assert manager.errored() is not None


def test_the_next_step_that_begins_while_a_failure_is_noticed_is_not_aborted(
    fixture: Fixture, aborts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    failed = manager._current.collectives

    def suspect(*_: Any) -> None:  # between the check of the failed step and the abort
        manager.start_quorum()
        manager.wait_quorum()

    monkeypatch.setattr(manager._server, "suspect", suspect)
    failed.report_error(RuntimeError("connection reset by peer"))
    assert failed is not manager._current.collectives
    assert aborts == [] and manager.errored() is None and manager.should_commit()


def test_the_next_step_begins_after_the_abort_of_the_last_one(
    fixture: Fixture, make_quorum: Quorum, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    collectives = manager._current.collectives
    aborting, connected = threading.Event(), threading.Event()
    # Start_quorum waits for the abort, or did not wait and has connected the next peers.
    went_on = threading.Event()
    monkeypatch.setattr(collectives, "_aborting", Contended(went_on))
    early: list[bool] = []

    def abort() -> None:
        aborting.set()
        assert went_on.wait(30)
        early.append(connected.is_set())

    def configure(*_: Any, **__: Any) -> None:
        connected.set()
        went_on.set()

    monkeypatch.setattr(fixture.pg, "abort", abort)
    failing = threading.Thread(target=collectives.report_error, args=(RuntimeError("connection reset"),))
    failing.start()
    assert aborting.wait(30)
    fixture.client._quorum.return_value = make_quorum(quorum_id=2)
    monkeypatch.setattr(fixture.pg, "configure", configure)
    manager.start_quorum()
    manager.wait_quorum()
    failing.join(30)
    assert connected.is_set() and early == [False], "the peers of the next step would be aborted"
    assert manager.errored() is None


def test_two_failures_of_a_step_do_not_wait_for_each_other(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort ends other collectives of the step, on any thread, and each of them reports its failure."""
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    collectives = manager._current.collectives
    ended: list[bool] = []

    def abort() -> None:
        collectives.report_error(RuntimeError("ended by the abort, on its thread"))
        other = threading.Thread(
            target=collectives.report_error, args=(RuntimeError("ended by the abort"),), daemon=True
        )
        other.start()
        other.join(30)
        ended.append(not other.is_alive())

    monkeypatch.setattr(fixture.pg, "abort", abort)
    collectives.report_error(RuntimeError("connection reset by peer"))
    assert ended == [True] and collectives.aborted
