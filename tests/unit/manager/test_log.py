"""The log of a Manager, and its records for exporters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable

import pytest
import torch

from tests.unit.manager.quorums import Quorum, healing, peer_state

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture


def test_the_log_of_a_heal_has_the_duration_of_each_phase(
    fixture: Fixture, make_quorum: Quorum, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(result: Any, seconds: float = 0.05) -> Callable[..., Any]:
        return lambda *_, **__: (time.sleep(seconds), result)[1]

    manager = fixture.manager(load_state_dict=slow(None))
    assert manager.recovery_seconds() == dict.fromkeys(["quorum", "reconfigure", "transfer", "load"], 0)
    fixture.client._quorum.side_effect = slow(healing(make_quorum))
    fixture.pg.configure = slow(None)  # type: ignore[method-assign]
    fixture.transport.recv_checkpoint.side_effect = slow(peer_state(user={"default": torch.ones(1000)}))
    caplog.set_level("INFO")
    manager.start_quorum()
    assert manager.should_commit()
    seconds = manager.recovery_seconds()
    assert set(seconds) == {"quorum", "reconfigure", "transfer", "load"}
    assert all(0.05 <= each < 60 for each in seconds.values()), seconds
    [record] = [r for r in caplog.records if r.name == "torchft_recoveries"]
    assert (record.from_step, record.bytes) == (0, 4000)  # type: ignore[attr-defined]
    assert record.load_seconds == seconds["load"]  # type: ignore[attr-defined]
    assert f"transfer {seconds['transfer']:.2f} s (0.000 GB" in record.getMessage()
    # A new quorum in which this group does not heal leaves them unchanged.
    fixture.client._quorum.side_effect = slow(make_quorum(quorum_id=2, max_step=21))
    manager.start_quorum()
    assert manager.should_commit()
    assert manager.recovery_seconds() == seconds


def test_records_of_quorums_commits_and_errors(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JOB_ID", "job")
    caplog.set_level("INFO")
    manager = fixture.manager()
    manager.start_quorum()
    manager.wait_quorum()
    manager.report_error(RuntimeError("bad gradient"))
    assert not manager.should_commit()
    records = {
        r.name: r
        for r in caplog.records
        if r.name in ("torchft_quorums", "torchft_commits", "torchft_errors")
    }
    for record in records.values():
        fields = vars(record)
        assert {key: fields[key] for key in ("job_id", "replica_id", "rank", "quorum_id", "step")} == dict(
            job_id="job", replica_id="group_1:uuid", rank=1, quorum_id=1, step=0
        )
    assert records["torchft_quorums"].getMessage() == "quorum 1"
    assert vars(records["torchft_commits"])["commit_result"] is False
    assert (
        vars(records["torchft_errors"])["error"] == records["torchft_errors"].getMessage() == "bad gradient"
    )


def test_a_step_in_an_unchanged_quorum_logs_nothing(
    fixture: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    """A line is logged when the quorum changes. Records for exporters have separate loggers."""
    caplog.set_level("INFO")
    manager = fixture.manager()
    logged = []
    for _ in range(20):
        manager.start_quorum()
        manager.allreduce(torch.ones(2)).wait()
        assert manager.should_commit()
        logged.append([r.getMessage() for r in caplog.records if r.name.startswith("torchft.")])
    assert len(logged[0]) == 1 and "quorum 1: replica rank" in logged[0][0]
    assert logged[-1] == logged[0]
