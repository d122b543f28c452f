"""What the Manager says: lines for people, and one record for each quorum, commit, recovery and error for
machines."""

from __future__ import annotations

import importlib
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


# Where OpenTelemetry's logs go, and whether they go at all, by its own variables.
_OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = ("otlp", "console")


def otel_exporters() -> list[str]:
    """The exporters that OpenTelemetry's variables ask for; none unless they ask for one.

    Raises:
        ValueError: OTEL_LOGS_EXPORTER names one that is not known.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    text = os.environ.get("OTEL_LOGS_EXPORTER", "").strip()
    if not text:
        return ["otlp"] if any(os.environ.get(name) for name in _OTLP_ENDPOINTS) else []
    kinds = [kind.strip() for kind in text.split(",")]
    if kinds == ["none"]:
        return []
    for kind in kinds:
        if kind not in _EXPORTERS:
            raise ValueError(f"OTEL_LOGS_EXPORTER={text!r}: allowed are none, or {' and '.join(_EXPORTERS)}")
    return kinds


def export_events() -> None:
    """Sends the events to OpenTelemetry if the environment asks for it. That costs nothing where it does not."""
    if not otel_exporters():
        return
    try:
        otel = importlib.import_module("torchft.otel")
    except ImportError as e:
        message = "OpenTelemetry's variables ask for an export of events, which needs pip install 'torchft[otel]': %s"
        logging.getLogger("torchft.manager").warning(message, e)
        return
    for logger in (_quorums, _commits, _errors, _recoveries):
        otel.setup_logger(logger.name)


class _ManagerLogger:
    """Prefixes each line with who says it and at which step."""

    def __init__(self, manager: Manager, replica_id: str, group_rank: int) -> None:
        self._logger = logging.getLogger("torchft.manager")
        self._manager = manager
        self._replica_id = replica_id
        self._group_rank = group_rank
        export_events()

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
