"""What the Manager says: lines for people, and one record for each quorum, commit, recovery and error for
machines."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from torchft._manager.incident import Incident
    from torchft._manager.phases import Phases
    from torchft.manager import Manager

_quorums = logging.getLogger("torchft_quorums")
_commits = logging.getLogger("torchft_commits")
_errors = logging.getLogger("torchft_errors")
_failures = logging.getLogger("torchft_failures")
_recoveries = logging.getLogger("torchft_recoveries")


class _ManagerLogger:
    """Prefixes each line with who says it and at which step."""

    def __init__(self, manager: Manager, replica_id: str, group_rank: int) -> None:
        self._logger = logging.getLogger("torchft.manager")
        self._manager = manager
        self._replica_id = replica_id
        self._group_rank = group_rank

    def prefix(self) -> str:
        return f"[{self._replica_id}/{self._group_rank} - step {self._manager.current_step()}]"

    def info(self, msg: str) -> None:
        self._logger.info("%s %s", self.prefix(), msg)

    def warn(self, msg: str) -> None:
        self._logger.warning("%s %s", self.prefix(), msg)

    def exception(self, msg: str) -> None:
        self._logger.exception("%s %s", self.prefix(), msg)

    def quorum_event(self) -> None:
        self._event(_quorums, logging.INFO, f"quorum {self._manager._quorum_id}")

    def commit_event(self, committed: bool) -> None:
        self._event(_commits, logging.INFO, "committed" if committed else "not committed", commit_result=committed)

    def error_event(self, error: Optional[Exception]) -> None:
        self._event(_errors, logging.ERROR, str(error), error=str(error))

    def recovery_event(self, from_step: int, phases: Phases) -> None:
        text = f"healed from step {from_step} in {phases}"
        self.info(text)
        self._event(_recoveries, logging.INFO, text, from_step=from_step, bytes=phases.received, **_named(phases))

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

    def _event(self, logger: logging.Logger, level: int, msg: str, **fields: Any) -> None:
        # These records are for exporters: without a handler of their own they would reach Python's handler of last
        # resort and print empty lines.
        if not logger.isEnabledFor(level) or not logger.hasHandlers():
            return
        logger.log(
            level,
            msg,
            extra={
                "job_id": os.environ.get("JOB_ID", "unknown"),
                "replica_id": self._replica_id,
                "rank": self._group_rank,
                "quorum_id": self._manager._quorum_id,
                "step": self._manager.current_step(),
                **fields,
            },
        )


def _named(phases: Phases) -> dict[str, float]:
    return {f"{name}_seconds": seconds for name, seconds in phases.seconds.items()}
