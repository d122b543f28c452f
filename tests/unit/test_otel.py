from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Iterator

import pytest

from torchft._manager.log import export_events, otel_exporters
from torchft.http import _IPv6HTTPServer

VARIABLES = (
    "OTEL_SDK_DISABLED",
    "OTEL_LOGS_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
)


@pytest.fixture(autouse=True)
def none_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("env", "exporters"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/v1/logs"}, ["otlp"]),
        ({"OTEL_LOGS_EXPORTER": "console"}, ["console"]),
        ({"OTEL_LOGS_EXPORTER": "otlp, console"}, ["otlp", "console"]),
        ({"OTEL_LOGS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []),
    ],
)
def test_environment_decides(env: dict[str, str], exporters: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert otel_exporters() == exporters


def test_unknown_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "zipkin")
    with pytest.raises(ValueError, match="OTEL_LOGS_EXPORTER='zipkin': allowed are none, or otlp and console"):
        otel_exporters()


def test_missing_packages_are_told_and_cost_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "console")
    monkeypatch.setitem(sys.modules, "torchft.otel", None)
    export_events()
    assert "pip install 'torchft[otel]'" in caplog.text


def test_off_means_off() -> None:
    """Neither the package is loaded nor a handler set."""
    script = (
        "import sys, torchft.manager\n"
        "from torchft._manager.log import export_events\n"
        "export_events()\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'torchft.otel'))])\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=env)
    assert done.stdout == "[]\n", done.stderr


# With OpenTelemetry


@pytest.fixture
def otel() -> Iterator[Any]:
    module = pytest.importorskip("torchft.otel", reason="needs OpenTelemetry: pip install 'torchft[otel]'")
    yield module
    module.shutdown()


class Collector:
    """An OTLP endpoint that keeps what it gets."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.bodies.append(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        self.server = _IPv6HTTPServer(("", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def test_events_arrive_at_a_collector(otel: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attributes = tmp_path / "attributes.json"
    attributes.write_text(json.dumps({"torchft_commits": {"team": "vision"}}))
    monkeypatch.setenv(otel.TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON, str(attributes))
    collector = Collector()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://localhost:{collector.server.server_port}")
        export_events()
        export_events()  # a second Manager of this process
        assert sorted(otel._LOGGER_PROVIDER) == [
            "torchft_commits", "torchft_errors", "torchft_quorums", "torchft_recoveries",
        ]  # fmt: skip
        logging.getLogger("torchft_commits").info("committed", extra={"step": 7, "quorum_id": 3})
        otel.shutdown()
    finally:
        collector.close()
    (body,) = collector.bodies  # once, not twice
    for text in (b"committed", b"step", b"quorum_id", b"team", b"vision", b"torchft_commits"):
        assert text in body
    assert otel._LOGGER_PROVIDER == {} and logging.getLogger("torchft_commits").handlers == []


def test_setup_without_being_asked_does_nothing(otel: Any) -> None:
    otel.setup_logger("torchft_commits")
    assert otel._LOGGER_PROVIDER == {}


def test_tee_gives_to_all_whatever_comes_of_one(otel: Any) -> None:
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, LogRecordExportResult

    class Failing(InMemoryLogRecordExporter):
        def export(self, batch: Any) -> LogRecordExportResult:
            return LogRecordExportResult.FAILURE

    kept = InMemoryLogRecordExporter()
    assert otel.TeeLogExporter([Failing(), kept]).export([]) == LogRecordExportResult.FAILURE
    assert otel.TeeLogExporter([kept]).export([]) == LogRecordExportResult.SUCCESS
    assert otel.TeeLogExporter([kept]).force_flush()


def test_bad_resource_attributes(otel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "console")
    for bad in ("/nowhere/at/all", "{no json", '{"torchft_commits": 5}'):
        monkeypatch.setenv(otel.TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON, bad)
        with pytest.raises(ValueError, match="is no JSON object of objects by the name of a logger"):
            otel.setup_logger("torchft_commits")


def test_command_says_where_a_record_goes(otel: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    otel.main()
    assert capsys.readouterr().out.startswith("off: ")
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "console")
    otel.main()
    said = capsys.readouterr()
    assert "through console" in said.out and "to see whether it arrives" in said.err
