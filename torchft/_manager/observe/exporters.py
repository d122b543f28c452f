"""Which OpenTelemetry exporters the environment asks for, found out without importing OpenTelemetry."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

_EXPORTERS = ("otlp", "console")

#: true: export records to OTLP and the console without OpenTelemetry's own variables; false: export none.
#: Default: as OpenTelemetry's variables say.
USE_OTEL_ENV = "TORCHFT_USE_OTEL"


def otel_exporters(signal: str = "LOGS") -> list[str]:
    """The exporters that the environment asks for: OpenTelemetry's own variables name them, and for logs
    TORCHFT_USE_OTEL switches on OpenTelemetry's default. Empty by default.

    Args:
        signal: LOGS or TRACES.

    Raises:
        ValueError: OTEL_LOGS_EXPORTER, or OTEL_TRACES_EXPORTER, names one that is not known.
    """
    setting = f"OTEL_{signal}_EXPORTER"
    switch = os.environ.get(USE_OTEL_ENV, "").strip().lower() if signal == "LOGS" else ""
    if switch == "false":
        return []
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    text = os.environ.get(setting, "").strip()
    if not text and switch:
        return [*_EXPORTERS]
    if not text:
        endpoints = (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
        return ["otlp"] if any(os.environ.get(name) for name in endpoints) else []
    kinds = [kind.strip() for kind in text.split(",")]
    if kinds == ["none"]:
        return []
    for kind in kinds:
        if kind not in _EXPORTERS:
            raise ValueError(f"{setting}={text!r}: allowed are none, or {' and '.join(_EXPORTERS)}")
    return kinds


def otel_for(signal: str, what: str) -> Any:
    """``torchft.otel`` if the environment asks for exporters of a signal and has OpenTelemetry; else None."""
    if not otel_exporters(signal):
        return None
    try:
        return importlib.import_module("torchft.otel")
    except ImportError as e:
        message = "OpenTelemetry's variables ask for %s, which needs pip install '.[otel]': %s"
        logging.getLogger("torchft.manager").warning(message, what, e)
        return None
