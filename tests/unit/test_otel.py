from __future__ import annotations

import gzip
import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Iterator
from unittest.mock import MagicMock

import pytest

from tests.unit.children import run_python
from torchft._manager.observe.exporters import otel_exporters
from torchft._manager.observe.log import export_events
from torchft._torchft import ManagerClient, QuorumRequest
from torchft.http import _IPv6HTTPServer

VARIABLES = (
    "TORCHFT_USE_OTEL",
    "OTEL_SDK_DISABLED",
    "OTEL_LOGS_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
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
        ({"TORCHFT_USE_OTEL": "true"}, ["otlp", "console"]),  # upstream's exporters
        ({"TORCHFT_USE_OTEL": "0"}, ["otlp", "console"]),  # in upstream, any value but "false" switches it on
        ({"TORCHFT_USE_OTEL": "true", "OTEL_LOGS_EXPORTER": "console"}, ["console"]),
        ({"TORCHFT_USE_OTEL": "false", "OTEL_LOGS_EXPORTER": "console"}, []),
    ],
)
def test_environment_decides(
    env: dict[str, str], exporters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert otel_exporters() == exporters


def test_upstreams_switch_exports_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_USE_OTEL", "true")
    assert otel_exporters("TRACES") == []


def test_unknown_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "zipkin")
    with pytest.raises(
        ValueError, match="OTEL_LOGS_EXPORTER='zipkin': allowed are none, or otlp and console"
    ):
        otel_exporters()


def test_missing_packages_are_logged_and_have_no_other_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "console")
    monkeypatch.setitem(sys.modules, "torchft.otel", None)
    export_events()
    assert "pip install '.[otel]'" in caplog.text


def test_off_means_off() -> None:
    """The package is not loaded, and no handler is set."""
    script = (
        "import sys, torchft.manager\n"
        "from torchft._manager.observe.log import export_events\n"
        "export_events()\n"
        "from torchft._manager.observe.trace import step_trace\n"
        "assert step_trace('g', 0) is None\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'torchft.otel'))])\n"
    )
    done = run_python(script)
    assert done.stdout == "[]\n", done.stderr


# With OpenTelemetry


@pytest.fixture
def otel() -> Iterator[Any]:
    module = pytest.importorskip("torchft.otel", reason="needs OpenTelemetry: pip install '.[otel]'")
    yield module
    module.shutdown()


class Collector:
    """An OTLP endpoint that keeps what it receives."""

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
            "torchft_audits", "torchft_commits", "torchft_divergences", "torchft_errors", "torchft_failures",
            "torchft_quorums", "torchft_recoveries",
        ]  # fmt: skip
        logging.getLogger("torchft_commits").info("committed", extra={"step": 7, "quorum_id": 3})
        otel.shutdown()
    finally:
        collector.close()
    (body,) = collector.bodies  # once and not twice
    for text in (b"committed", b"step", b"quorum_id", b"team", b"vision", b"torchft_commits"):
        assert text in body
    assert otel._LOGGER_PROVIDER == {} and logging.getLogger("torchft_commits").handlers == []


def test_setup_without_being_asked_does_nothing(otel: Any) -> None:
    otel.setup_logger("torchft_commits")
    assert otel._LOGGER_PROVIDER == {}


def test_tee_exports_to_all_even_if_one_fails(otel: Any) -> None:
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, LogRecordExportResult

    class Failing(InMemoryLogRecordExporter):
        def export(self, batch: Any) -> LogRecordExportResult:
            return LogRecordExportResult.FAILURE

    class Raising(InMemoryLogRecordExporter):
        def export(self, batch: Any) -> LogRecordExportResult:
            raise OSError("the disk is full")

    kept = MagicMock()
    kept.export.return_value = LogRecordExportResult.SUCCESS
    with pytest.raises(OSError, match="the disk is full"):
        otel.TeeLogExporter([Raising(), kept]).export([])
    kept.export.assert_called_once_with([])
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


def test_the_command_prints_where_a_record_is_sent(
    otel: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    otel.main()
    assert capsys.readouterr().out.startswith("off: ")
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "console")
    otel.main()
    output = capsys.readouterr()
    assert "through console" in output.out and "to see whether it arrives" in output.err


@pytest.mark.parametrize(
    ("env", "exporters"),
    [
        ({}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://c:4318/v1/logs"}, []),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, ["otlp"]),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, []),
    ],
)
def test_environment_decides_on_traces(env: dict[str, str], exporters: list[str], monkeypatch: Any) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert otel_exporters("TRACES") == exporters


def test_the_steps_of_a_manager_arrive_at_a_collector(otel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from torch.distributed import TCPStore

    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupDummy

    collector = Collector()
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://localhost:{collector.server.server_port}/v1/traces"
    )
    try:
        manager = Manager(
            ProcessGroupDummy(0, 1),
            lambda state: None,
            dict,
            min_replica_size=1,
            timeout=timedelta(seconds=30),
            rank=0,
            world_size=1,
            store_addr="localhost",
            store_port=store.port,
            lighthouse_addr=lighthouse.address(),
            replica_id="traced",
        )
        given: list[str] = []
        stands = manager._client._stands_for

        def note(client: ManagerClient, request: QuorumRequest, last: Any) -> bool:
            given.append(request.traceparent)
            return stands(request, last)

        monkeypatch.setattr(ManagerClient, "_stands_for", note)
        for _ in range(2):
            manager.start_quorum()
            assert manager.should_commit()
        manager.shutdown()
        otel.shutdown()
    finally:
        lighthouse.shutdown()
        collector.close()
    body = b"".join(collector.bodies)
    for text in (b"torchft.step", b"torchft.quorum_id", b"torchft.committed", b"traced"):
        assert text in body
    assert len(set(given)) == 2, "each step has a separate trace"
    for context in given:
        version, trace_id, span_id, flags = context.split("-")
        assert (version, flags) == ("00", "01")
        assert bytes.fromhex(trace_id) in body and bytes.fromhex(span_id) in body


TWO_STEPS = """
import sys
from datetime import timedelta
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupDummy

lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    ProcessGroupDummy(0, 1), lambda state: None, dict, min_replica_size=1, timeout=timedelta(seconds=30),
    rank=0, world_size=1,
    store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse.address(), replica_id="traced",
)
for step in range(2):
    manager.start_quorum()
    if step == 1:
        manager.report_error(RuntimeError("out of cheese"))
    assert manager.should_commit() == (step == 0)
manager.shutdown()
lighthouse.shutdown()
"""


@pytest.mark.slow
def test_a_trace_is_whole_from_the_rank_to_the_lighthouse(otel: Any) -> None:
    """In a separate process, because the native library reads the environment when it is loaded."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector = Collector()
    try:
        endpoint = f"http://localhost:{collector.server.server_port}"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_LOGS_EXPORTER": "none"}
        # Not forked: Go would have its parent's environment.
        done = run_python(TWO_STEPS, by_itself=True, env=env)
        assert done.returncode == 0, done.stderr
    finally:
        collector.close()
    traces: dict[bytes, dict[str, Any]] = {}
    for body in collector.bodies:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                named = traces.setdefault(span.trace_id, {})
                assert span.name not in named
                named[span.name] = span

    def attributes(span: Any) -> dict[str, Any]:
        return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}

    steps = sorted(traces.values(), key=lambda spans: attributes(spans["step"])["torchft.step"])
    assert len(steps) == 2, "each step has a separate trace"
    below = {
        "manager.quorum": "step",
        "manager.ask_lighthouse": "manager.quorum",
        "lighthouse.quorum": "manager.ask_lighthouse",
        "manager.should_commit": "step",
    }
    for number, spans in enumerate(steps):
        assert set(spans) == {"step", *below}
        for name, parent in below.items():
            assert spans[name].parent_span_id == spans[parent].span_id, name
        for span in spans.values():
            assert attributes(span)["torchft.step"] == number
            assert attributes(span)["torchft.replica_id"].startswith("traced")
        assert attributes(spans["manager.should_commit"])["torchft.vote"] is (number == 0)
        for name in ("step", "manager.should_commit"):
            assert attributes(spans[name])["torchft.committed"] is (number == 0), name
