"""`torchft cluster` shows a cluster of lighthouses, and changes it; commands ask one lighthouse after the
other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from torchft.cli import main
from torchft.cli.cluster import table

A, B, C = "http://a:29510", "http://b:29510", "http://c:29510"


def status(leader: str = B, **more: Any) -> dict[str, Any]:
    members = [{"address": a, "leads": a == leader, "voter": True, "reached": a != C} for a in (A, B, C)]
    shown = {"self": A, "leader": leader, "since_ms": 720_000, "term": 3, "members": members, "trouble": ""}
    return {**shown, **more}


def test_the_members_the_leader_and_since_when() -> None:
    assert table(status()).splitlines() == [
        f"cluster: {B} has led 3 lighthouses for 12 min; not reached: {C}",
        f"as seen by {A}",
        "",
        "lighthouse      state",
        f"{A}  follower",
        f"{B}  leader",
        f"{C}  not reached",
    ]


def test_no_leader_and_a_lighthouse_that_takes_no_part() -> None:
    shown = table(status("", trouble="/state: no space left on device")).splitlines()
    assert (
        shown[0]
        == f"cluster: no leader for 12 min; 2 of 3 lighthouses must reach each other; not reached: {C}"
    )
    assert shown[-1] == f"{A}: /state: no space left on device"
    waits = {"address": A, "leads": False, "voter": False, "reached": True}
    hostile = {**waits, "address": "http://\x1b[J:1"}
    shown = table(status("", members=[waits, hostile])).splitlines()
    assert shown[0] == "cluster: no leader for 12 min"
    assert shown[-2:] == [f"{A}  not in the cluster", "http://?[J:1    not in the cluster"]
    assert table(status(members=None)).splitlines()[3:4] == ["lighthouse  state"]
    alone = {"address": B, "leads": True, "voter": True, "reached": True}
    assert table(status(members=[alone])).splitlines()[0] == f"cluster: {B} has led 1 lighthouse for 12 min"


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0 s"), (89_400, "89 s"), (90_000, "2 min"), (5_400_000, "2 h"), (129_600_000, "2 d")],
)
def test_how_long_it_leads(ms: int, text: str) -> None:
    assert f" has led 3 lighthouses for {text}; " in table(status(since_ms=ms))


Answers = Mapping[str, "tuple[int, object]"]  # status code and JSON, by path


class Lighthouses:
    """Stand-ins for lighthouses that answer by path, and what they received."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.received: list[tuple[str, object]] = []

    def start(self, answers: Answers) -> str:
        received = self.received

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = answers.get(self.path, (404, {"error": "this lighthouse is in no cluster"}))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def do_POST(self) -> None:
                received.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
                self.do_GET()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = self._stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Answer))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._stack.callback(server.shutdown)
        return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def lighthouses() -> Iterator[Lighthouses]:
    with ExitStack() as stack:
        yield Lighthouses(stack)


@pytest.fixture
def output(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], tuple[int, str, str]]:
    """Runs a command, and gives its exit status and its output."""

    def run(arguments: list[str]) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


Output = Callable[[list[str]], "tuple[int, str, str]"]


def test_the_leader_is_asked_and_otherwise_the_first_that_answers(
    lighthouses: Lighthouses, closed_ports: list[int], output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = f"http://127.0.0.1:{closed_ports[0]}"
    leads = status(self="the leader")
    leader = lighthouses.start({"/cluster": (200, leads)})
    follower = lighthouses.start({"/cluster": (200, status(leader))})
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"{away},{follower}")
    monkeypatch.setenv("TORCHFT_JOB_ID", "a job")  # a cluster serves all jobs
    assert "as seen by the leader\n" in output(["cluster"])[1]
    assert json.loads(output(["cluster", "--json"])[1]) == leads
    lonely = lighthouses.start({"/cluster": (200, status(away))})
    assert f"as seen by {A}\n" in output(["cluster", "--lighthouse", lonely])[1]


def test_errors_are_a_line_and_1(
    lighthouses: Lighthouses, closed_ports: list[int], output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = lighthouses.start({})
    expected = f"torchft cluster: {alone}: this lighthouse is in no cluster\n"
    assert output(["cluster", "--lighthouse", alone]) == (1, "", expected)
    away = f"http://127.0.0.1:{closed_ports[0]}"
    code, _, error = output(["cluster", "--lighthouse", away])
    assert code == 1 and error.startswith(f"torchft cluster: no lighthouse answered ({away}: ")
    code, _, error = output(["cluster", "--lighthouse", lighthouses.start({"/cluster": (200, {"job": 1})})])
    assert code == 1 and "answered other JSON: is it a lighthouse?" in error
    code, _, error = output(["cluster", "--lighthouse", alone, "add", "d:29510"])
    assert code == 1 and "the lighthouse address 'd:29510' is not allowed; allowed: http://host:port" in error


def test_a_lighthouse_is_added_and_removed_through_any_that_reaches_the_leader(
    lighthouses: Lighthouses, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = {"error": "no leader is known"}
    add, remove = "/api/v1/cluster/add", "/api/v1/cluster/remove"
    first = lighthouses.start({add: (503, reason), remove: (503, reason)})
    done = {add: (200, {"address": B, "done": "added"}), remove: (409, {"error": "it is no member"})}
    second = lighthouses.start(done)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"{first},{second}")
    assert output(["cluster", "add", B + "/"]) == (0, f"{B}: added\n", "")
    assert lighthouses.received == [(add, {"address": B}), (add, {"address": B})]
    assert output(["cluster", "remove", C]) == (1, "", f"torchft cluster: {second}: it is no member\n")
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"{first},{first}")
    code, _, error = output(["cluster", "remove", C])
    assert code == 1
    assert error == f"torchft cluster: {'; '.join([f'{first}: no leader is known'] * 2)}\n"


def test_commands_ask_the_next_lighthouse_if_one_reaches_no_leader(
    lighthouses: Lighthouses, closed_ports: list[int], output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = {"error": "no leader is known"}
    paths = ("/status", "/api/v1/history", "/api/v1/kill", "/api/v1/drain")
    behind = lighthouses.start(dict.fromkeys(paths, (502, reason)))
    job = {"quorum_id": 1, "quorum": ["a"], "max_step": 3, "reason": "", "members": [], "cluster": status()}
    member = {
        "replica_id": "a",
        "healthy": True,
        "in_quorum": True,
        "waiting": False,
        "step": 3,
        "heartbeat_age_ms": 5,
    }
    served = lighthouses.start(
        {
            "/status": (200, {**job, "members": [member]}),
            "/api/v1/history": (200, {"events": []}),
            "/api/v1/kill": (200, {"replica_id": "a", "done": "killed"}),
            "/api/v1/drain": (200, {"replica_id": "a", "done": "drained"}),
        }
    )
    away = f"http://127.0.0.1:{closed_ports[0]}"
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"{away},{behind},{served}")
    code, shown, _ = output(["status"])
    assert code == 0 and f"\ncluster: {B} has led 3 lighthouses for " in shown
    assert output(["events"]) == (0, "", "")
    assert output(["kill", "a"]) == (0, "a: killed\n", "")
    assert output(["drain", "a"]) == (0, "a: drained\n", "")
