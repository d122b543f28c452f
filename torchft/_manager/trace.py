"""The steps of a rank as OpenTelemetry traces, which go on in the manager server and in the lighthouse.

Off unless OpenTelemetry's own variables ask for traces; nothing of it is imported then.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Optional, Protocol

from torchft._manager.edge import Server
from torchft._manager.errors import ExceptionWithTraceback
from torchft._manager.exporters import otel_exporters


class _Stepping(Protocol):
    """Who steps, and where it is."""

    _group_rank: int
    _participating_replica_world_size: int
    _quorum_id: int
    _replica_id: str
    _server: Server

    def current_step(self) -> int: ...
    def errored(self) -> Optional[ExceptionWithTraceback]: ...


class StepTrace:
    """A trace for each step: from the request for its quorum to the decision on it. Off, it does nothing."""

    def asks(self) -> None:
        """A quorum is about to be asked for: an attempt at a step begins."""

    def ended(self, step: int, committed: bool) -> None:
        """It was decided on the step."""


class _OtelStepTrace(StepTrace):
    def __init__(self, manager: _Stepping, tracer: Any) -> None:
        self._manager = manager
        self._tracer = tracer
        self._span: Optional[Any] = None

    def asks(self) -> None:
        if self._span is not None:
            self._end(committed=False)  # another attempt at the same step
        manager = self._manager
        self._span = self._tracer.start_span(
            "step",
            attributes={
                "torchft.step": manager.current_step(),
                "torchft.replica_id": manager._replica_id,
                "torchft.group_rank": manager._group_rank,
            },
        )
        manager._server.trace(_traceparent(self._span))

    def ended(self, step: int, committed: bool) -> None:
        if self._span is not None:
            self._span.set_attribute("torchft.step", step)  # that of the others, where this rank healed
            self._end(committed)

    def _end(self, committed: bool) -> None:
        span, self._span = self._span, None
        assert span is not None
        span.set_attribute("torchft.quorum_id", self._manager._quorum_id)
        span.set_attribute("torchft.groups", self._manager._participating_replica_world_size)
        span.set_attribute("torchft.committed", committed)
        error = self._manager.errored()
        if not committed and error is not None:
            span.record_exception(error.original_exception)
        span.end()


def _traceparent(span: Any) -> str:
    """What W3C trace context says of a span; of its flags only the one that all know, whether it is sampled."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def step_trace(manager: _Stepping) -> StepTrace:
    """Traces of a Manager's steps, if the environment asks for them.

    Raises:
        ValueError: OTEL_TRACES_EXPORTER names an exporter that is not known.
    """
    if not otel_exporters("TRACES"):
        return StepTrace()
    try:
        otel = importlib.import_module("torchft.otel")
    except ImportError as e:
        message = "OpenTelemetry's variables ask for traces, which need pip install 'torchft[otel]': %s"
        logging.getLogger("torchft.manager").warning(message, e)
        return StepTrace()
    return _OtelStepTrace(manager, otel.tracer())
