"""The keeper of a host, as a process: who starts it, what it outlives, and when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.promises import within
from torchft import _keeper
from torchft.cli import main
from torchft.launch import process_tree

pytestmark = pytest.mark.usefixtures("keepers")


def pid_of(memory: Path) -> int:
    return int((memory / "keeper.lock").read_text().split()[1])


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def began(memory: Path) -> bool:
    return _keeper.running(memory) and (memory / "keeper.lock").read_text().endswith("\n")


@pytest.fixture
def memory(memory_of_snapshots: Path) -> Generator[Path]:
    """The folder of the slots; its keeper ends with the test."""
    yield memory_of_snapshots
    if _keeper.running(memory_of_snapshots):
        os.kill(pid_of(memory_of_snapshots), signal.SIGKILL)


def test_a_job_starts_one_keeper_and_tells_it_its_lighthouse(
    memory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("token").write_text("secret")
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", "token")
    _keeper.ensure("a job", "http://127.0.0.1:1")
    until(lambda: began(memory))
    first = pid_of(memory)
    assert json.loads((memory / "a%20job" / "job.json").read_text()) == {
        "lighthouse": "http://127.0.0.1:1",
        "job": "default",
        "token_file": str(tmp_path / "token"),
        "tls_cert": "",
        "tls_key": "",
        "tls_ca": "",
        "tls_client_ca": "",
    }
    monkeypatch.setenv("TORCHFT_JOB_ID", "other")
    _keeper.ensure("another", "http://127.0.0.1:1")
    assert pid_of(memory) == first, "one keeper serves all jobs"
    assert json.loads((memory / "another" / "job.json").read_text())["job"] == "other"
    os.kill(first, signal.SIGKILL)
    until(lambda: not _keeper.running(memory))
    _keeper.ensure("another", "http://127.0.0.1:1")
    until(lambda: began(memory) and pid_of(memory) != first)


def test_it_outlives_its_starter_and_ends_by_sigterm(memory: Path) -> None:
    """Even the death of the whole tree of a launcher, as `torchft run` kills its groups, leaves it."""
    program = (
        "import time; from torchft import _keeper; _keeper.ensure('j', 'http://127.0.0.1:1'); time.sleep(600)"
    )
    log = memory / "starter.log"
    starter = process_tree.start([sys.executable, "-c", program], log)
    until(lambda: (memory / "keeper.lock").exists() and began(memory))
    keeper = pid_of(memory)
    assert keeper not in process_tree.kill_tree(starter)
    assert os.getsid(keeper) != os.getsid(0)
    assert process_tree.alive([keeper])
    slot = memory / "j" / "group" / "rank-0" / "0"
    slot.parent.mkdir(parents=True)
    slot.write_bytes(bytes(4096))
    os.kill(keeper, signal.SIGTERM)
    until(lambda: not process_tree.alive([keeper]))
    assert slot.exists()
    assert not _keeper.running(memory)


def test_a_second_one_says_who_runs(memory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _keeper.start(memory)
    until(lambda: began(memory))
    command = [sys.executable, "-m", "torchft.cli", "keeper"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert re.fullmatch(
        rf"torchft keeper: a keeper of {memory} runs already: process {pid_of(memory)}\n", done.stdout
    )


def test_it_ends_when_its_folder_is_removed(memory: Path) -> None:
    _keeper.start(memory)
    until(lambda: began(memory))
    keeper = pid_of(memory)
    for path in memory.iterdir():
        path.unlink()
    until(lambda: not process_tree.alive([keeper]), within(2.0))


def test_a_job_trains_on_without_a_keeper(
    memory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory.chmod(0o777)
    _keeper.ensure("j", "http://127.0.0.1:1")
    assert "no keeper runs on this host" in caplog.text
    assert "no other one may write to it" in caplog.text
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "folder"), [("a b/c", "a%20b%2Fc"), ("..", "%2E%2E"), (".", "%2E"), ("a.b", "a.b")]
)
def test_the_folder_of_a_name(name: str, folder: str) -> None:
    assert _keeper.quoted(name) == folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--keep", "-1"], "a time above 0"),
        (["--bind", "nowhere"], 'bind is "nowhere"'),
        (["--rooot", "x"], "did you mean --root?"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["keeper", *arguments])
    except SystemExit as e:
        status = int(e.code or 0)
    assert status == 2
    assert says in capfd.readouterr().err
