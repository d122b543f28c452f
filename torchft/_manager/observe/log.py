"""The Manager's log lines, and one record for each event: a quorum, commit, error, failure, heal,
divergence or audit that found something.

A record has three sinks: a Python logger for each kind, the manager server for what metrics and dashboard
show, and OpenTelemetry, whose handlers :func:`export_events` adds to these loggers. Training does not depend
on any of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional, Protocol

from torchft._manager.observe.exporters import otel_for

if TYPE_CHECKING:
    from torchft._manager.observe.phases import Incident, Phases

_KINDS = ("quorums", "commits", "errors", "failures", "recoveries", "divergences", "audits")
_events = {kind: logging.getLogger(f"torchft_{kind}") for kind in _KINDS}


def export_events() -> None:
    """Sends the events to OpenTelemetry if the environment asks for it; otherwise nothing is imported."""
    otel = otel_for("LOGS", "an export of events")
    if otel is not None:
        for logger in _events.values():
            otel.setup_logger(logger.name)


class _Stepping(Protocol):
    """The step and quorum of a rank."""

    @property
    def _quorum_id(self) -> int: ...

    def current_step(self) -> int: ...


class _ManagerLogger:
    """Prefixes each line with replica id, rank and step, and records events.

    Args:
        manager: has the step and quorum of the rank; the argument's name is upstream's. A Manager passes its
            ``RankState``.
        report: sends a report to the manager server, given its kind and fields (``GroupServer.report``);
            None: there is none.
    """

    def __init__(
        self,
        manager: _Stepping,
        replica_id: str,
        group_rank: int,
        report: Optional[Callable[..., None]] = None,
    ) -> None:
        self._logger = logging.getLogger("torchft.manager")
        self._rank_state = manager
        self.replica_id = replica_id
        self._group_rank = group_rank
        self.reports = report is not None
        self.commits = _events["commits"]
        self._report = report or (lambda *_, **__: None)
        export_events()

    def prefix(self) -> str:
        return f"[{self.replica_id}/{self._group_rank} - step {self._rank_state.current_step()}]"

    def info(self, msg: str) -> None:
        self._logger.info("%s %s", self.prefix(), msg)

    def warn(self, msg: str) -> None:
        self._logger.warning("%s %s", self.prefix(), msg)

    def exception(self, msg: str) -> None:
        self._logger.exception("%s %s", self.prefix(), msg)

    # For the manager server only

    def counted(self, name: str, number: int = 1) -> None:
        """Adds to a counter; go/manager/counted.go lists the names (``Counters``)."""
        self._report("counted", name=name, number=number)

    def heal_progress(self, received: int, total: int) -> None:
        """Reports the bytes of a peer's state that have arrived, and the total."""
        self._report("healing", received=received, total=total)

    def phase(self, phase: str) -> None:
        """Reports that the script begins a phase; empty: it ends the one before."""
        self._report("progress", begins=True, phase=phase or "UNSAID")

    def stalled(self, collective: str, stacks: str) -> None:
        """This rank makes no progress while other groups wait: logs where it is, and reports it.

        Args:
            collective: the one that it waits for, in words; empty: it is not known.
            stacks: those of its threads.
        """
        self.warn(f"this group is stalled{collective and f', in {collective}'}; its threads:\n{stacks}")
        self._report("stacks", collective=collective, stacks=stacks)

    def worked(self, took_us: list[int], host: str) -> None:
        """Reports how long this rank has worked in each of its last steps without waiting for others."""
        self._report("own", took_us=took_us, host=host)

    def raised(self, raised: Mapping[str, Any]) -> bool:
        """Reports an exception that ends this rank. Returns whether there is a server that answers."""
        self._report("raised", **raised)
        return self.reports

    # Events

    def quorum_event(self) -> None:
        self._event("quorums", f"quorum {self._rank_state._quorum_id}")

    def commit_event(self, committed: bool) -> None:
        self._event("commits", "committed" if committed else "not committed", commit_result=committed)

    def error_event(self, error: Optional[Exception]) -> None:
        self._event("errors", str(error), logging.ERROR, error=str(error))

    def recovery_event(self, from_step: int, phases: Phases) -> None:
        """A peer's state was loaded."""
        text, nbytes = f"healed from step {from_step} in {phases}", phases.received
        self.info(text)
        self._event("recoveries", text, from_step=from_step, bytes=nbytes, **_seconds(phases.seconds))
        self._recovered(phases.seconds, healed=True, bytes=nbytes)

    def failure_event(self, incident: Incident) -> None:
        """The first step after a failure is committed."""
        text, seconds = str(incident), incident.seconds
        fields = {
            "cause": incident.cause,
            "failed_step": incident.step,
            "failed_quorum_id": incident.quorum_id,
        }
        self.info(text)
        with_total = _seconds({**seconds, "total": sum(seconds.values())})
        self._event("failures", text, steps_lost=incident.steps_lost, **fields, **with_total)
        self._recovered(seconds, quorum_id=incident.quorum_id, steps_lost=incident.steps_lost)

    def divergence_event(
        self, text: str, digested_step: int, groups: list[str], tensors: list[str], certain: bool
    ) -> None:
        """Groups differ in weights or optimizer state. ``certain``: a majority shows which are wrong."""
        self.warn(text)
        fields = {"groups": ", ".join(groups), "tensors": "; ".join(tensors), "certain": certain}
        self._event("divergences", text, logging.ERROR, digested_step=digested_step, **fields)

    def audit_event(self, text: str, groups: list[str], certain: bool, reports: bool) -> None:
        """Groups have computed different gradients of the same unit.

        Args:
            groups: those that are wrong; all if that is not known.
            certain: whether a majority shows that they are.
            reports: whether this rank tells the lighthouse, as all others do that know as much.
        """
        self.warn(text)
        self._event("audits", text, logging.ERROR, groups=", ".join(groups), certain=certain)
        if reports:
            self._report("corrupted", replica_ids=groups, reason=text)

    def _recovered(self, seconds: Mapping[str, float], **fields: Any) -> None:
        phases = [{"phase": name, "seconds": took} for name, took in seconds.items()]
        self._report("recovered", step=self._rank_state.current_step(), phases=phases, **fields)

    def _event(self, kind: str, msg: str, level: int = logging.INFO, **fields: Any) -> None:
        logger = _events[kind]
        # Without a handler these records would reach logging.lastResort, which prints a line for each.
        if not logger.isEnabledFor(level) or not logger.hasHandlers():
            return
        of_rank = {
            "job_id": os.environ.get("JOB_ID", "unknown"),
            "replica_id": self.replica_id,
            "rank": self._group_rank,
            "quorum_id": self._rank_state._quorum_id,
            "step": self._rank_state.current_step(),
        }
        logger.log(level, msg, extra={**of_rank, **fields})


def _seconds(phases: Mapping[str, float]) -> dict[str, Any]:
    return {f"{name.replace(' ', '_')}_seconds": seconds for name, seconds in phases.items()}
