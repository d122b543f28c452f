"""`torchft waive` looks for evidence against a waiver, and then sends its request to one lighthouse of a list."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from torchft.cli import main
from torchft.cli.waive import Other, objections

WAITS = {
    "quorum_id": 7,
    "missing_votes": ["a:1", "b:1"],
    "members": [
        {"replica_id": "a:1", "healthy": False, "address": "http://a:2"},
        {"replica_id": "b:1", "healthy": False},
        {"replica_id": "c:1", "healthy": True, "address": "http://c:2"},
    ],
}


def idle(**status: Any) -> Other:
    return Other("http://second:1", {"quorum_id": 7, "members": [{"replica_id": "c:1", "healthy": False}], **status})


@pytest.mark.parametrize(
    ("others", "accepts", "against"),
    [
        ([idle()], [], []),
        ([Other("http://second:1")], [], []),  # a restarted lighthouse, which does not know the job
        ([idle()], ["http://c:2"], []),  # c waits, and its vote is not missing
        ([idle()], ["http://a:2"], ["a:1 has not ended: its manager accepts connections at http://a:2"]),
        (
            [Other("http://second:1", unanswered="no lighthouse answered")],
            [],
            ["groups may train at http://second:1, which does not answer: no lighthouse answered"],
        ),
        (
            [idle(members=[{"replica_id": "b:1", "healthy": True}, {"replica_id": "d:1", "healthy": True}])],
            [],
            ["b:1, d:1 may train at http://second:1: end them first"],
        ),
        (
            [Other("http://third:1", {"quorum_id": 8})],
            [],
            ["http://third:1 knows a later quorum: waive its votes there, where its groups wait"],
        ),
        (
            [idle(given_votes=["a:1"])],
            [],
            ["http://second:1 has votes of groups that ended there: restart a:1 first"],
        ),
    ],
)
def test_evidence_against_a_waiver(others: list[Other], accepts: list[str], against: list[str]) -> None:
    assert objections(WAITS, others, lambda address: address in accepts) == against


@contextmanager
def lighthouse(status: Mapping[str, Any] | None, received: list[tuple[str, str]]) -> Iterator[str]:
    """A lighthouse that answers with a status, or does not know the job."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"error": "not known"} if status is None else status, 404 if status is None else 200)

        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"])).decode()))
            self.reply({"replica_id": "a:1", "done": "waived"}, 200)

        def reply(self, body: object, code: int) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_only_the_lighthouse_that_lacks_a_vote_gets_the_waiver(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, str]] = []
    with (
        lighthouse({"members": [], "missing_votes": []}, received) as first,
        lighthouse({"members": [], "missing_votes": ["a:1", "b:1"]}, received) as second,
        lighthouse(None, received) as third,
    ):
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"{first},{second},{third}")
        monkeypatch.setattr("builtins.input", lambda _: "no")
        assert main(["waive", "a"]) == 1
        output = capsys.readouterr()
        assert "nothing was done" in output.err and "the job has two histories" in output.out and received == []
        monkeypatch.setattr("builtins.input", lambda _: "yes")
        assert main(["waive", "a"]) == 0
        assert main(["waive", "--yes", "a", "b"]) == 0
        assert received == [("/api/v1/waive", json.dumps({"replica_id": name})) for name in ("a:1", "a:1", "b:1")]
        assert main(["waive", "--yes", "c"]) == 1
        assert "'c' is no group" in capsys.readouterr().err
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", first)
        assert main(["waive", "--yes", "a"]) == 1
        assert "no lighthouse that answers misses a vote" in capsys.readouterr().err


def test_a_waiver_is_refused_unless_the_risk_is_accepted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[str, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as manager, socket.create_server(("127.0.0.1", 0)) as ended:
        address = f"http://127.0.0.1:{manager.getsockname()[1]}"
        unreachable = f"http://127.0.0.1:{ended.getsockname()[1]}"
        ended.close()
        status = {"missing_votes": ["a:1"], "members": [{"replica_id": "a:1", "healthy": False, "address": address}]}
        with lighthouse(status, received) as first:
            monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"{unreachable},{first}")
            assert main(["waive", "--yes", "a"]) == 1
            output = capsys.readouterr()
            assert f"a:1 has not ended: its manager accepts connections at {address}" in output.err
            assert f"groups may train at {unreachable}, which does not answer" in output.err
            assert "--risk-two-histories" in output.err and output.out == "" and received == []
            assert main(["waive", "--yes", "--risk-two-histories", "a"]) == 0
            output = capsys.readouterr()
            assert "although a:1 has not ended" in output.out and "a:1: waived" in output.out
            assert len(received) == 1
