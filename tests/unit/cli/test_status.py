"""`torchft status`, `events`, `kill` and `drain`, with a real lighthouse or with given answers."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchft import _lighthouse_http
from torchft.cli import events, main
from torchft.cli.events import words
from torchft.cli.status import table
from torchft.coordination import LighthouseClient, LighthouseServer
from torchft.launch import job

SEC = timedelta(seconds=1)


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[LighthouseServer]:
    # The members send no heartbeats after their requests. They must not count as failed before the end of a
    # test.
    server = LighthouseServer(
        "127.0.0.1:0", min_replicas=2, join_timeout_ms=100, heartbeat_timeout_ms=600_000
    )
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", server.address())
    yield server
    server.shutdown()


def ask(server: LighthouseServer, name: str, step: int) -> None:
    client = LighthouseClient(server.address(), 10 * SEC)
    client.quorum(name, timeout=10 * SEC, address="http://localhost:1", step=step)


def test_no_group_and_then_two_groups(
    lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("no quorum yet\n")

    threads = [threading.Thread(target=ask, args=(lighthouse, name, 7)) for name in ("left", "right\x1b[2J")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    assert ": 2 groups, step 7\n" in shown
    assert "left " in shown and "right?[2J " in shown, "a name moves no cursor"
    assert shown.count("training") == 2 and "http://localhost:1" in shown

    assert main(["events"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"[\d-]+ [\d:]+  quorum    left, right\?\[2J joined; 2 groups train from step 7; every .*", line
    )
    assert main(["events", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["joined"] == ["left", "right\x1b[2J"]


def test_the_file_of_the_address_is_read_for_each_request(
    tmp_path: Path, lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lighthouse"
    assert main(["status", "--lighthouse", str(file)]) == 1
    assert f"TORCHFT_LIGHTHOUSE={file}: No such file or directory" in capsys.readouterr().err
    file.write_text("http://127.0.0.1:1\n")
    moves = _lighthouse_http.HttpLighthouse(str(file))
    file.write_text(f"{lighthouse.address()}\n")
    assert moves.get("/status")["members"] == []


def test_a_regression_is_shown() -> None:
    shown = words(
        {"time": "2026-11-30T12:00:00Z", "kind": "regressed", "step": 0, "reason": "begins at step 0"}
    )
    assert shown.endswith("regressed begins at step 0")


@pytest.mark.parametrize(
    ("known", "step"),
    [({"in_quorum": True}, "1404"), ({"waiting": True, "healthy": True}, "1404"), ({"step": 0}, "-")],
)
def test_a_group_in_neither_quorum_nor_request_has_no_known_step(known: dict[str, Any], step: str) -> None:
    """For example, a group that was killed at step 1404, after the others went on without it."""
    member = {"replica_id": "a", "step": 1404, "in_quorum": False, "waiting": False, "healthy": False}
    member |= {"heartbeat_age_ms": 100, **known}
    status = {"quorum_id": 1, "quorum": ["b"], "max_step": 1404, "reason": "", "members": [member]}
    assert table(status).splitlines()[-1].split()[2] == step


def test_followed_events_arrive_at_once(lighthouse: LighthouseServer) -> None:
    command = [
        sys.executable,
        "-m",
        "torchft.cli",
        "events",
        "--follow",
        "--lighthouse",
        lighthouse.address(),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            for names in (("a", "b"), ("a", "c")):
                threads = [threading.Thread(target=ask, args=(lighthouse, name, 1)) for name in names]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert any(f"{names[1]} joined" in line for line in follower.stdout)
        finally:
            follower.kill()


def test_following_outlasts_a_lighthouse_without_events(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the next leader of a cluster has none."""

    def event(number: int) -> dict[str, Any]:
        return {"id": number, "kind": "quorum", "time": "2026-01-02T03:04:05Z"}

    streams: list[list[tuple[str, Any]]] = [
        [("whole", {"last": 2, "events": [event(1), event(2)]})],
        [],  # the lighthouse is away
        [("whole", {"last": 0, "events": []})],
        [],
        [("whole", {"last": 1, "events": [event(1)]})],
    ]

    class Away:
        def stream(self, path: str) -> Iterator[tuple[str, Any]]:
            if not (messages := streams.pop(0)):
                raise _lighthouse_http.Unanswered("away")
            yield from messages

    monkeypatch.setattr("torchft.cli.events.time.sleep", lambda _: None)
    followed = events._followed(Away())  # type: ignore[arg-type]
    assert [next(followed)["id"] for _ in range(3)] == [1, 2, 1]
    assert capsys.readouterr().err == "torchft events: another lighthouse leads; its events follow\n"


def test_kill_names_the_known_groups(
    lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    LighthouseClient(lighthouse.address(), 10 * SEC).heartbeat("group_1:abc")
    assert main(["kill", "group_2"]) == 1
    assert (
        "'group_2' is no group (did you mean group_1:abc?); there are: group_1:abc" in capsys.readouterr().err
    )
    assert main(["kill", ""]) == 1, "as in `torchft kill $NAME` with quotes and without a value"
    assert "'' is no group; there are: group_1:abc" in capsys.readouterr().err
    # The group is known, but the lighthouse cannot end it, and reports the reason.
    assert main(["kill", "group_1"]) == 1
    assert ": member 'group_1" in capsys.readouterr().err.replace('"', "'"), "as the lighthouse's JSON says"
    assert main(["drain", "group_1"]) == 1
    assert "it has no stream to this lighthouse" in capsys.readouterr().err


def test_kill_and_drain_remove_control_characters_from_names(
    lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]
) -> None:
    LighthouseClient(lighthouse.address(), 10 * SEC).heartbeat("evil\x1b[2J")
    for command in ("kill", "drain"):
        for name in ("nobody", "evil"):
            assert main([command, name]) == 1
            errors = capsys.readouterr().err
            assert "[2J" in errors and "\x1b" not in errors, errors


def test_a_watch_continues_when_the_lighthouse_does_not_answer(
    lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the lighthouse is being restarted."""
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 1:
            lighthouse.shutdown()
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("torchft.cli.status.time", SimpleNamespace(sleep=sleep))
    assert main(["status", "--watch", "100ms"]) == 130
    first, second = capsys.readouterr().out.split("no replica group is known\n")
    assert first.startswith("no quorum yet") and second.startswith("no lighthouse answered (http"), second
    assert looks == [0.1, 0.1]
    assert main(["status", "--watch"]) == 1, "one that was never there is an error"


def test_a_wait_for_a_lighthouse_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_lighthouse_http, "_SILENT_SEC", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        expected = rf"no lighthouse answered \({address}: no answer within 1.5 s\); is it running"
        with pytest.raises(_lighthouse_http.Unanswered, match=expected):
            _lighthouse_http.HttpLighthouse(address, timeout=1.5).get("/status")
    assert capsys.readouterr().err == f"waiting for the lighthouse at {address}, at most 1.5 s\n"


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        pytest.param(["status"], b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"members": [', id="status"),
        pytest.param(["kill", "a"], b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", id="kill"),
        pytest.param(["status"], b"HTTP/1.1 503 Busy\r\nContent-Length: 500\r\n\r\nwait", id="a refusal"),
        pytest.param(
            ["events", "--follow"],
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nevent: ",
            id="stream",
        ),
    ],
)
def test_a_lighthouse_that_ends_in_the_middle_of_its_answer(
    command: list[str], answer: bytes, answering: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--lighthouse", answering(answer)]) == 1
    assert "the connection to the lighthouse broke: " in capsys.readouterr().err


@pytest.mark.parametrize("json", [b'{"job": 1}', b"[1]", b"1"])
@pytest.mark.parametrize("command", ["status", "events", "kill a", "drain a"])
def test_a_server_that_is_no_lighthouse(
    command: str, json: bytes, answering: Callable[[bytes], str], capsys: pytest.CaptureFixture[str]
) -> None:
    address = answering(b"HTTP/1.0 200 OK\r\n\r\n" + json)
    assert main([*command.split(), "--lighthouse", address]) == 1
    assert (errors := capsys.readouterr().err).startswith(f"torchft {command.split()[0]}: "), errors


def test_a_job_does_not_end_because_an_answer_of_its_lighthouse_breaks_off(
    answering: Callable[[bytes], str],
) -> None:
    cut = b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"'
    assert job.status(answering(cut))["members"] == []
    assert job.drain(answering(cut), "a") is False


def test_requests_do_not_go_through_a_proxy_of_the_environment(
    lighthouse: LighthouseServer, closed_ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all other connections of a job: a proxy would not reach the hosts of a cluster, or this one."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_ports[0]}")
    monkeypatch.delenv("no_proxy", raising=False)
    done = subprocess.run(
        [sys.executable, "-m", "torchft.cli", "status"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_named_job_is_shown(
    lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("TORCHFT_JOB_ID", "other.job")
        LighthouseClient(lighthouse.address(), 10 * SEC).heartbeat("mine")
        assert main(["status"]) == 0
        assert "mine" in capsys.readouterr().out
        assert main(["kill", "yours"]) == 1
        assert "there are: mine" in capsys.readouterr().err
        assert main(["status", "--job", "default"]) == 0
        assert "mine" not in capsys.readouterr().out
    assert main(["status", "--job=other.job"]) == 0
    assert "mine" in capsys.readouterr().out
    assert main(["drain", "--job=other.job", "mine"]) == 1
    assert "it has no stream" in capsys.readouterr().err, "the lighthouse looked for it in that job"
    unknown = (
        f'{lighthouse.address()}: no group of job "nobody" has joined at this lighthouse; GET /jobs lists the'
    )
    for command in ("events", "status"):
        assert main([command, "--job=nobody"]) == 1
        assert capsys.readouterr().err.startswith(f"torchft {command}: {unknown} jobs that it has\n")


def test_a_failed_member_and_a_waiting_one() -> None:
    common = {"heartbeat_age_ms": 1500, "step": 3, "address": "", "in_quorum": False, "waiting_ms": 0}
    alive = {**common, "healthy": True, "waiting": False, "in_quorum": True}
    members = [
        {**common, "replica_id": "a", "healthy": False, "waiting": False},
        {**common, "replica_id": "b", "healthy": True, "waiting": True, "waiting_ms": 1001},
        {**alive, "replica_id": "c", "healing": True},
        {**alive, "replica_id": "d", "stalled": "rank 0 computes"},
        {**alive, "replica_id": "e", "suspect": True},
        {**alive, "replica_id": "f", "draining": "an operator"},
        {**alive, "replica_id": "g", "healthy": False, "draining": "an operator", "out": "it left"},
    ]
    status = {
        "quorum_id": 4,
        "quorum": ["a"],
        "max_step": 3,
        "reason": "b waits for a",
        "median_step_ms": 900,
    }
    shown = table({**status, "members": members})
    assert "next: b waits for a" in shown
    assert "next" not in table({**status, "median_step_ms": 1200, "members": members}), (
        "it waits no longer than a step"
    )
    assert "next" in table({**status, "quorum_id": 0, "median_step_ms": 0, "members": members})
    trains = {"quorum_id": 4, "quorum": ["c"], "max_step": 3, "members": [{**alive, "replica_id": "c"}]}
    assert "next" not in table({**trains, "reason": "no member asks for a quorum"}), "no member waits"
    states = ["failed", "waiting", "healing", "stalled", "suspect", "draining", "draining"]
    assert [line.split()[:2] for line in shown.splitlines()[-7:]] == [
        [n, s] for n, s in zip("abcdefg", states)
    ]


def test_the_cost_of_a_recovery_and_the_draining_members() -> None:
    event = {"time": "2026-01-02T03:04:05Z", "who": "b", "step": 7}
    phases = [{"phase": "transfer", "seconds": 2.5}, {"phase": "load", "seconds": 0.25}]
    healed = words({**event, "kind": "healed", "bytes": 1_500_000_000, "phases": phases})
    assert healed.endswith("b took over 1.500 GB of step 7: 2.75 s (transfer 2.50 s, load 0.25 s)")
    recovered = words(
        {**event, "kind": "recovered", "steps_lost": 1, "phases": [{"phase": "abort", "seconds": 0.02}]}
    )
    assert recovered.endswith("b and the others go on, 1 step lost: 0.02 s (abort 0.02 s)")
    drained = words({**event, "kind": "drained", "left": ["c"], "reason": "somebody asked"})
    assert drained.endswith("c is to leave at the end of a step; somebody asked")
    refused = words({**event, "kind": "refused", "left": ["c"], "reason": "world_size of member c is 3"})
    assert refused.endswith("c was refused; world_size of member c is 3")
    stalled = words({**event, "kind": "stalled", "left": ["c"], "reason": "no progress for 30s"})
    assert stalled.endswith("the others wait for c; no progress for 30s")
    stacks = {
        **event,
        "kind": "stacks",
        "who": "c",
        "reason": "rank 1",
        "stacks": "Thread 0x1\n  File \x1b[0m",
    }
    first, *more = words(stacks).splitlines()
    assert first.endswith("c; rank 1") and more[0] == "Thread 0x1" and "\x1b" not in more[1]
    stopped = words({**event, "kind": "stopped", "reason": "the job stops: ValueError\nTraceback"})
    assert stopped.endswith("the job stops: ValueError\nTraceback")
    scaled = words({**event, "kind": "scaled", "reason": "2 -> 3 groups: 10 steps/s with 2"})
    assert scaled.endswith("scaled    2 -> 3 groups: 10 steps/s with 2")


def test_no_command_imports_torch() -> None:
    modules = "torchft.cli.doctor, torchft.cli.ending, torchft.cli.run, torchft.cli.scale, torchft.cli.status"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
