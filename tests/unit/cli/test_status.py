"""`torchft status` and `torchft kill` at a real lighthouse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

from torchft.cli import main
from torchft.cli.status import table
from torchft.coordination import LighthouseClient, LighthouseServer

SEC = timedelta(seconds=1)


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", server.address())
    yield server
    server.shutdown()


def ask(server: LighthouseServer, name: str, step: int) -> None:
    client = LighthouseClient(server.address(), 10 * SEC)
    client.quorum(name, timeout=10 * SEC, address="http://localhost:1", step=step)


def test_nobody_and_then_two_groups(lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert re.fullmatch(r"[\d-]+ [\d:]+  quorum   left, right\?\[2J joined; 2 groups train from step 7; every .*", line)
    assert main(["events", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["joined"] == ["left", "right\x1b[2J"]


def test_events_that_are_followed_come_at_once(lighthouse: LighthouseServer) -> None:
    command = [sys.executable, "-m", "torchft.cli", "events", "--follow", "--lighthouse", lighthouse.address()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            assert follower.stdout is not None
            for names in (("a", "b"), ("a", "c")):
                threads = [threading.Thread(target=ask, args=(lighthouse, name, 1)) for name in names]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert f"{names[1]} joined" in follower.stdout.readline()
        finally:
            follower.kill()


def test_kill_names_those_that_there_are(lighthouse: LighthouseServer, capsys: pytest.CaptureFixture[str]) -> None:
    LighthouseClient(lighthouse.address(), 10 * SEC).heartbeat("group_1:abc")
    assert main(["kill", "group_2"]) == 1
    assert "'group_2' is no group (did you mean group_1:abc?); there are: group_1:abc" in capsys.readouterr().err
    # It is one, and the lighthouse says why it does not end it.
    assert main(["kill", "group_1"]) == 1
    assert "answered 40" in capsys.readouterr().err


def test_a_dead_member_and_one_that_waits() -> None:
    said = {"heartbeat_age_ms": 1500, "step": 3, "address": "", "in_quorum": False}
    members = [
        {**said, "replica_id": "a", "healthy": False, "waiting": False},
        {**said, "replica_id": "b", "healthy": True, "waiting": True},
    ]
    shown = table({"quorum_id": 4, "quorum": ["a"], "max_step": 3, "reason": "b waits for a", "members": members})
    assert "next: b waits for a" in shown
    assert [line.split()[:2] for line in shown.splitlines()[-2:]] == [["a", "dead"], ["b", "waiting"]]


def test_no_command_imports_torch() -> None:
    modules = "torchft.cli.doctor, torchft.cli.kill, torchft.cli.run, torchft.cli.status"
    check = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
