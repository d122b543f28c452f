"""The Manager's log lines, and its records for exporters: one for each quorum, commit, error, failure, heal and
divergence."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Optional, Protocol

from torchft._manager.exporters import otel_for
from torchft._manager.reports import Reports

if TYPE_CHECKING:
    from torchft._manager.incident import Incident
    from torchft._manager.phases import Phases

_quorums = logging.getLogger("torchft_quorums")
_commits = logging.getLogger("torchft_commits")
_errors = logging.getLogger("torchft_errors")
_failures = logging.getLogger("torchft_failures")
_recoveries = logging.getLogger("torchft_recoveries")
_divergences = logging.getLogger("torchft_divergences")


def export_events() -> None:
    """Sends the events to OpenTelemetry if the environment asks for it; otherwise nothing is imported."""
    otel = otel_for("LOGS", "an export of events")
    if otel is not None:
        for logger in (_quorums, _commits, _errors, _failures, _recoveries, _divergences):
            otel.setup_logger(logger.name)


class _Stepping(Protocol):
    """The step and quorum of a rank."""

    @property
    def _quorum_id(self) -> int: ...

    def current_step(self) -> int: ...


class _ManagerLogger:
    """Prefixes each line with replica id, rank and step.

    Args:
        manager: has the step and quorum of the rank; the argument's name is upstream's. A Manager passes its
            ``Place``.
        replica_id, group_rank: the identity of this rank.
        reports: sends values for the dashboard and the metrics to the manager server; None: nothing is sent.
    """

    def __init__(self, manager: _Stepping, replica_id: str, group_rank: int, reports: Optional[Reports] = None) -> None:
        self._logger = logging.getLogger("torchft.manager")
        self._place = manager
        self._replica_id = replica_id
        self._group_rank = group_rank
        self._reports = reports or Reports(lambda *_, **__: None)
        export_events()

    def prefix(self) -> str:
        return f"[{self._replica_id}/{self._group_rank} - step {self._place.current_step()}]"

    def info(self, msg: str) -> None:
        self._logger.info("%s %s", self.prefix(), msg)

    def warn(self, msg: str) -> None:
        self._logger.warning("%s %s", self.prefix(), msg)

    def exception(self, msg: str) -> None:
        self._logger.exception("%s %s", self.prefix(), msg)

    def quorum_event(self) -> None:
        self._event(_quorums, logging.INFO, f"quorum {self._place._quorum_id}")

    def commit_event(self, committed: bool) -> None:
        self._event(_commits, logging.INFO, "committed" if committed else "not committed", commit_result=committed)

    def error_event(self, error: Optional[Exception]) -> None:
        self._event(_errors, logging.ERROR, str(error), error=str(error))

    def heal_progress(self, received: int, total: int) -> None:
        """Reports the bytes of a peer's state that have arrived, and the total."""
        self._reports.healing(received, total)

    def recovery_event(self, from_step: int, phases: Phases) -> None:
        text = f"healed from step {from_step} in {phases}"
        self.info(text)
        self._event(_recoveries, logging.INFO, text, from_step=from_step, bytes=phases.received, **_named(phases))
        self._reports.healed(self._place.current_step(), phases)

    def failure_event(self, incident: Incident) -> None:
        self.info(str(incident))
        self._event(
            _failures,
            logging.INFO,
            str(incident),
            cause=incident.cause,
            failed_step=incident.step,
            failed_quorum_id=incident.quorum_id,
            steps_lost=incident.steps_lost,
            **{f"{phase.replace(' ', '_')}_seconds": s for phase, s in incident.seconds().items()},
        )
        self._reports.recovered(self._place.current_step(), incident)

    def divergence_event(
        self, text: str, digested_step: int, groups: list[str], tensors: list[str], certain: bool
    ) -> None:
        """Records that groups have different weights or optimizer state. ``certain``: whether a majority of equal
        groups shows which groups are wrong.
        """
        self.warn(text)
        fields = {"groups": ", ".join(groups), "tensors": "; ".join(tensors), "certain": certain}
        self._event(_divergences, logging.ERROR, text, digested_step=digested_step, **fields)

    def _event(self, logger: logging.Logger, level: int, msg: str, **fields: Any) -> None:
        # Without a handler these records would reach logging.lastResort, which prints a line for each.
        if not logger.isEnabledFor(level) or not logger.hasHandlers():
            return
        logger.log(
            level,
            msg,
            extra={
                "job_id": os.environ.get("JOB_ID", "unknown"),
                "replica_id": self._replica_id,
                "rank": self._group_rank,
                "quorum_id": self._place._quorum_id,
                "step": self._place.current_step(),
                **fields,
            },
        )


def _named(phases: Phases) -> dict[str, float]:
    return {f"{name}_seconds": seconds for name, seconds in phases.seconds.items()}
