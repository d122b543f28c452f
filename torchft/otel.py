"""The Manager's events as OpenTelemetry logs: quorums, commits, errors, failures and recoveries; its steps as
traces.

Off unless OpenTelemetry's own variables ask for it: OTEL_EXPORTER_OTLP_ENDPOINT or
OTEL_EXPORTER_OTLP_LOGS_ENDPOINT, or OTEL_LOGS_EXPORTER with ``otlp``, ``console`` or both.
OTEL_SDK_DISABLED=true and OTEL_LOGS_EXPORTER=none switch it off. TORCHFT_USE_OTEL, upstream's switch, means
both exporters for logs where these variables name none; ``false`` means none. All others (OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, …) mean what they always do. Traces go by
OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT in the same way. Needs ``pip install '.[otel]'``.
`python -m torchft.otel` sends one record and prints where to.

Records are sent from a thread of OpenTelemetry's. Without a collector they are lost; training is not
affected.
"""

# pyrefly: ignore-errors[missing-import]  # an extra

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, List, Sequence

from opentelemetry import trace
from opentelemetry.sdk._logs import LoggerProvider, LoggingHandler, ReadableLogRecord
from opentelemetry.sdk._logs.export import (
    BatchLogRecordProcessor,
    ConsoleLogRecordExporter,
    LogRecordExporter,
    LogRecordExportResult,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from torchft._manager.observe.exporters import otel_exporters

__all__ = ["TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON", "TeeLogExporter", "setup_logger", "shutdown", "tracer"]

#: OpenTelemetry's resource attributes for each logger: `{"torchft_commits": {"team": "vision"}}`, or the path
#: of a file with that. Default: none.
TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON = "TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON"

_LOGGER_PROVIDER: dict[str, LoggerProvider] = {}
_HANDLERS: dict[str, logging.Handler] = {}
_TRACER_PROVIDER: TracerProvider | None = None


class TeeLogExporter(LogRecordExporter):
    """Passes each batch to several exporters.

    Args:
        exporters: the exporters; each gets every batch, even if another one fails.
    """

    def __init__(self, exporters: List[LogRecordExporter]) -> None:
        self._exporters = exporters

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Runs all exporters. Returns FAILURE if one of them failed; raises the first error of one."""
        result, errors = LogRecordExportResult.SUCCESS, []
        for exporter in self._exporters:
            try:
                if exporter.export(batch) != LogRecordExportResult.SUCCESS:
                    result = LogRecordExportResult.FAILURE
            except Exception as e:
                errors.append(e)
        if errors:
            raise errors[0]
        return result

    def shutdown(self) -> None:
        for exporter in self._exporters:
            exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        # 1.39's need not have it.
        flushes = [getattr(exporter, "force_flush", None) for exporter in self._exporters]
        flushed = [flush(timeout_millis) for flush in flushes if flush is not None]
        return all(flushed)


def setup_logger(name: str) -> None:
    """Exports the records of a Python logger. Does nothing unless the environment asks for it, or if called
    twice.

    Args:
        name: name of the logger. One without a level gets INFO.

    Raises:
        ValueError: OTEL_LOGS_EXPORTER or TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON is not understood.
    """
    kinds = otel_exporters()
    if not kinds or name in _LOGGER_PROVIDER:
        return
    resource = Resource.create(_resource_attributes(name))
    provider = LoggerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_log_record_processor(
        BatchLogRecordProcessor(TeeLogExporter([_exporter(kind) for kind in kinds]))
    )
    logger = logging.getLogger(name)
    with warnings.catch_warnings():
        # The SDK warns that this handler will move to another package, where it sends nothing more.
        warnings.simplefilter("ignore", DeprecationWarning)
        _HANDLERS[name] = LoggingHandler(level=logging.NOTSET, logger_provider=provider)
    _LOGGER_PROVIDER[name] = provider
    logger.addHandler(_HANDLERS[name])
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def tracer() -> trace.Tracer:
    """Returns a tracer. Its spans go to the exporters that the environment names."""
    global _TRACER_PROVIDER
    if _TRACER_PROVIDER is None:
        provider = TracerProvider(shutdown_on_exit=False)
        for kind in otel_exporters("TRACES"):
            provider.add_span_processor(BatchSpanProcessor(_span_exporter(kind)))
        _TRACER_PROVIDER = provider
    return _TRACER_PROVIDER.get_tracer("torchft")


def shutdown() -> None:
    """Sends the remaining records, and ends the export. Also called when the process ends."""
    global _TRACER_PROVIDER
    if _TRACER_PROVIDER is not None:
        _TRACER_PROVIDER.shutdown()
        _TRACER_PROVIDER = None
    for name in list(_LOGGER_PROVIDER):
        logging.getLogger(name).removeHandler(_HANDLERS.pop(name))
        _LOGGER_PROVIDER.pop(name).shutdown()


atexit.register(shutdown)


def _exporter(kind: str) -> LogRecordExporter:
    if kind == "console":
        return ConsoleLogRecordExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter

    return OTLPLogExporter()


def _span_exporter(kind: str) -> SpanExporter:
    if kind == "console":
        return ConsoleSpanExporter(out=sys.stderr)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _resource_attributes(name: str) -> dict[str, Any]:
    setting = os.environ.get(TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON, "").strip()
    if not setting:
        return {}
    try:
        attributes = json.loads(setting if setting.startswith("{") else Path(setting).read_text())
        mine = attributes.get(name, {})
        if not isinstance(mine, dict):
            raise ValueError(f"{name!r} has {mine!r}")
        return mine
    except (OSError, ValueError, AttributeError) as e:
        raise ValueError(
            f"{TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON}={setting!r} is no JSON object of objects by the name "
            f"of a logger and no file with one: {e}"
        ) from e


def main() -> None:
    """Sends one record, to test whether it arrives."""
    kinds = otel_exporters()
    if not kinds:
        print("off: set OTEL_EXPORTER_OTLP_ENDPOINT, or OTEL_LOGS_EXPORTER to otlp or console")
        return
    setup_logger("torchft_errors")
    logging.getLogger("torchft_errors").info("a record of torchft.otel, to see whether it arrives")
    arrived = _LOGGER_PROVIDER["torchft_errors"].force_flush()
    shutdown()
    print(
        f"sent one record of the logger torchft_errors through {', '.join(kinds)}" if arrived else "not sent"
    )


if __name__ == "__main__":
    main()
