"""Lighthouses of `torchft run`: each is started again when it ends, and none outlives the job."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.waiting import wait_until
from torchft.launch import lighthouse, process_tree
from torchft.launch.lighthouse import LaunchError, free_port, lighthouses


def test_a_free_port_is_outside_the_range_of_outgoing_connections() -> None:
    ports = [free_port() for _ in range(300)]
    assert len(set(ports)) == 300, "a port that was handed out may not be in use yet"
    assert all(port < 32768 for port in ports)


def test_a_folder_of_sources_does_not_hide_the_package_from_the_lighthouse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a clone after `pip install .`."""
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with lighthouses(tmp_path, ["--min_replicas", "1"], bind="127.0.0.1:0") as (address, _):
        assert address.startswith("http://127.0.0.1:")


def test_a_port_in_use_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(lighthouse, "_PORTS", [port] * 200)
        assert free_port() != port


def test_where_a_single_one_listens(program: Callable[[str], None], tmp_path: Path) -> None:
    program(LISTENS)
    with lighthouses(tmp_path, []) as (address, _):
        assert address == f"http://127.0.0.1:{lighthouse.DEFAULT_PORT}"
    program(f"import sys; ':{lighthouse.DEFAULT_PORT}' in sys.argv[1] and sys.exit('taken'); {LISTENS}")
    with lighthouses(tmp_path, []) as (address, _):
        assert address.startswith("http://127.0.0.1:2") and not address.endswith(str(lighthouse.DEFAULT_PORT))
    with lighthouses(tmp_path, [], bind="0.0.0.0:7") as (address, _):
        assert address == "http://localhost:7"


LISTENS = (
    "import sys, time; print(sys.argv[1:], flush=True); "
    "print('Lighthouse listening on:', sys.argv[1], flush=True); time.sleep(1000)"
)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the lighthouses by a program."""

    def use(code: str) -> None:
        def command(bind: str, state_dir: str, options: list[str]) -> list[str]:
            return [sys.executable, "-c", code, bind, state_dir, *options]

        monkeypatch.setattr(lighthouse, "command", command)

    return use


def pids(code: str) -> list[int]:
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in process_tree.tree(os.getpid())}
    return [pid for pid, command in commands.items() if code in command]


def test_each_gets_the_list_and_a_state_of_its_own(program: Callable[[str], None], tmp_path: Path) -> None:
    program(LISTENS)
    with lighthouses(tmp_path, ["--min_replicas", "1"], 3) as (addresses, _):
        assert len(set(addresses.split(","))) == 3
        logs = [(tmp_path / f"lighthouse-{number}.log").read_text() for number in (1, 2, 3)]
        for number, (address, log) in enumerate(zip(addresses.split(","), logs), 1):
            expected = [
                address.removeprefix("http://"),
                str(next(tmp_path.glob("lighthouses-*")) / str(number)),
            ]
            assert str([*expected, "--cluster", addresses, "--min_replicas", "1"]) in log
        running = pids(LISTENS)
        assert len(running) == 3
    assert process_tree.alive(running) == []
    assert list(tmp_path.glob("lighthouses-*")) == [], "no later job continues their state"


@pytest.mark.slow  # test_no_step_is_lost_when_the_leading_lighthouse_is_killed has it
def test_one_that_ends_is_restarted(program: Callable[[str], None], tmp_path: Path) -> None:
    def listened() -> int:
        return sum(log.read_text().count("listening") for log in tmp_path.glob("*.log"))

    program(LISTENS)
    with lighthouses(tmp_path, [], 3) as (_, check):
        for lives in range(4, 8):  # more often than a program that cannot start is restarted
            victim, *others = pids(LISTENS)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: not process_tree.alive([victim]))
            check()
            wait_until(lambda lives=lives: listened() == lives)
            assert set(others) < set(pids(LISTENS)) and victim not in pids(LISTENS)


def test_one_that_cannot_start_ends_the_job(program: Callable[[str], None], tmp_path: Path) -> None:
    code = "raise SystemExit('no port')"
    program(code)
    expected = "a lighthouse ended with status 1 before it listened: no port$"
    with pytest.raises(LaunchError, match=expected) as error, lighthouses(tmp_path, [], 3):
        pass
    assert error.value.logs[0].parent == tmp_path
    assert pids(code) == [] and list(tmp_path.glob("lighthouses-*")) == []


def test_lighthouses_that_do_not_listen_in_time(
    program: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lighthouse, "_START_SEC", 0.1)
    program("import time; time.sleep(1000)")
    expected = "timed out after 0.1 s: the lighthouses did not start"
    with pytest.raises(LaunchError, match=expected), lighthouses(tmp_path, [], 3):
        pass
