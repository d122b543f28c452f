"""The steps of a rank as OpenTelemetry traces, which the manager server and the lighthouse continue.

Traces are off unless OpenTelemetry's own variables ask for them. While they are off, OpenTelemetry is not
imported.
"""

from __future__ import annotations

from typing import Any, Optional

from torchft._manager.observe.exporters import otel_for


class StepTrace:
    """Makes a trace of each step, from its quorum request to the decision on it."""

    def __init__(self, tracer: Any, replica_id: str, group_rank: int) -> None:
        self._tracer = tracer
        self._of = {"torchft.replica_id": replica_id, "torchft.group_rank": group_rank}
        self._span: Optional[Any] = None

    def asks(self, number: int) -> str:
        """Begins the trace of an attempt at a step, before its quorum request.

        Returns:
            The W3C trace context, which the manager server and the lighthouse continue.
        """
        self._span = self._tracer.start_span("step", attributes={"torchft.step": number, **self._of})
        context = self._span.get_span_context()
        # Of the flags only "sampled" is kept, which every version defines.
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"

    def ended(
        self, number: int, quorum_id: int, groups: int, committed: bool, error: Optional[BaseException] = None
    ) -> None:
        """Ends the trace of the latest attempt; further calls do nothing.

        Args:
            number: step number; if this rank healed, the step that it healed to.
            quorum_id: -1 if the rank did not learn it.
            groups: number of groups whose gradients counted.
            committed, error: whether the step was committed, and why not.
        """
        span, self._span = self._span, None
        if span is None:
            return
        span.set_attribute("torchft.step", number)
        span.set_attribute("torchft.quorum_id", quorum_id)
        span.set_attribute("torchft.groups", groups)
        span.set_attribute("torchft.committed", committed)
        if not committed and error is not None:
            span.record_exception(error)
        span.end()


def step_trace(replica_id: str, group_rank: int) -> Optional[StepTrace]:
    """Traces of a rank's steps; None unless the environment asks. ValueError: for an unknown exporter."""
    otel = otel_for("TRACES", "traces")
    return None if otel is None else StepTrace(otel.tracer(), replica_id, group_rank)
