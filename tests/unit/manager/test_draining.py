"""A draining group completes its last step like any other step, and leaves after it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable

import pytest

from torchft._torchft import QuorumResult

Quorum = Callable[..., QuorumResult]


def test_the_step_in_which_a_group_drains_is_its_last(fixture: Any, make_quorum: Quorum) -> None:
    manager = fixture.manager()
    assert not manager.draining(), "before the first step"
    manager.start_quorum()
    assert manager.should_commit() and not manager.draining()

    fixture.client._quorum.return_value = make_quorum(draining=True)
    manager.start_quorum()
    manager.wait_quorum()
    assert not manager.draining(), "the others count on it in this step"
    assert manager.should_commit() and manager.draining()

    calls: list[str] = []
    fixture.client._leave.side_effect = lambda timeout: calls.append("leave")
    fixture.client.shutdown.side_effect = lambda: calls.append("close")
    fixture.transport.shutdown.side_effect = lambda wait: calls.append("transport")
    manager.shutdown()
    assert calls == ["leave", "transport", "close"]
    fixture.client._leave.assert_called_once_with(timedelta(seconds=10))
    manager.shutdown()
    fixture.client._leave.assert_called_once()


def test_a_draining_group_also_leaves_after_a_lost_step(fixture: Any, make_quorum: Quorum) -> None:
    fixture.client._quorum.return_value = make_quorum(draining=True)
    manager = fixture.manager()
    manager.start_quorum()
    manager.report_error(RuntimeError("no data"))
    assert not manager.should_commit() and manager.draining()


@pytest.mark.parametrize("draining", [True, False])
def test_a_group_that_ends_in_a_step_does_not_leave(
    fixture: Any, make_quorum: Quorum, draining: bool
) -> None:
    """The peers wait for this group in their collectives, so its end counts as a failure and is reported to
    them.
    """
    fixture.client._quorum.return_value = make_quorum(draining=draining)
    manager = fixture.manager()
    manager.start_quorum()
    manager.should_commit()
    manager.start_quorum()
    manager.wait_quorum()
    manager.shutdown()
    fixture.client._leave.assert_not_called()


def test_a_lighthouse_that_does_not_answer_is_no_error(
    fixture: Any, make_quorum: Quorum, caplog: pytest.LogCaptureFixture
) -> None:
    fixture.client._quorum.return_value = make_quorum(draining=True)
    fixture.client._leave.side_effect = RuntimeError("the lighthouse is away")
    manager = fixture.manager()
    manager.start_quorum()
    manager.should_commit()
    manager.shutdown()
    assert "the other groups may miss this one: the lighthouse is away" in caplog.text
    fixture.client.shutdown.assert_called()


def test_a_transfer_reports_to_its_watcher() -> None:
    import logging

    from torchft.checkpointing.client.progress import TransferProgress, watched_by

    now = 0.0
    reports: list[tuple[int, int]] = []
    with watched_by(lambda *bytes_: reports.append(bytes_)):
        watched = TransferProgress("it", logging.getLogger("x"), clock=lambda: now)
    alone = TransferProgress("it", logging.getLogger("x"), clock=lambda: now)
    for second in range(4):
        now = second / 4
        watched.update(second, 9)
        alone.update(second, 9)
    assert reports == [(0, 9), (2, 9)], "twice a second"
