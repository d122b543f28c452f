"""`torchft run` that cannot start says why in a line; a signal ends its groups."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchft.cli import main, run


class Groups:
    """Groups that were started; they run until they are killed."""

    def __init__(self, *_: Any) -> None:
        self.members: list[Any] = []
        self.decision = ""
        self.calls: list[str] = []
        self.lighthouses = ""
        self.ticks = 0
        # The first arrives while they run, further ones while they end.
        self.signals: list[signal.Signals] = []

    def of(self, arguments: Sequence[Any]) -> Groups:
        self.lighthouses = arguments[3]
        return self

    def tick(self) -> bool:
        self.ticks += 1
        return self.ticks == 1

    def pause(self) -> None:
        for number in self.signals[:1]:
            signal.raise_signal(number)

    def end(self, grace: float) -> None:
        self.calls.append("end")
        for number in self.signals[1:]:
            signal.raise_signal(number)
        self.calls.append("ended")

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    @contextlib.contextmanager
    def lighthouses(
        folder: Path, options: list[str], count: int, bind: str | None
    ) -> Iterator[tuple[str, Any]]:
        yield ",".join(f"http://localhost:{number}" for number in range(1, count + 1)), lambda: None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(run, "lighthouses", lighthouses)
    started = Groups()
    monkeypatch.setattr(run, "LocalJob", lambda *arguments: started.of(arguments))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield started
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("folder", ["taken", "taken/logs"])
def test_a_log_folder_that_cannot_be_made(
    folder: str, groups: Groups, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").touch()
    assert main(["run", "--log-dir", folder, __file__]) == 1
    assert f"torchft run: logs cannot be written to the folder {folder!r}: " in capsys.readouterr().err
    assert groups.calls == []


def test_a_folder_that_cannot_be_written_names_the_option(
    groups: Groups, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("torchft-logs").touch()  # as in a folder that is read-only: the folder cannot be made
    assert main(["run", __file__]) == 1
    assert (
        "the folder 'torchft-logs': File exists; choose a folder with --log-dir\n" in capsys.readouterr().err
    )
    Path("logs").mkdir()
    Path("logs/lighthouse.log").symlink_to("/dev/full/nothing")
    assert main(["run", "--log-dir", "logs", __file__]) == 1
    assert "the folder 'logs': Not a directory; choose a folder with --log-dir\n" in capsys.readouterr().err
    assert groups.calls == []


def test_a_control_socket_that_cannot_be_made_costs_no_more_than_scale(
    tmp_path: Path, groups: Groups, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torchft").mkdir(mode=0o755)
    assert main(["run", __file__]) == 0
    assert (
        f"torchft run: `torchft scale` cannot reach this job: {tmp_path / 'torchft'} must be a folder that "
        "only this "
        "user can enter"
    ) in capsys.readouterr().err
    assert groups.calls == ["kill"]


@pytest.mark.parametrize(
    ("options", "addresses"),
    [
        ([], "http://localhost:1"),
        (["--lighthouses", "3"], "http://localhost:1,http://localhost:2,http://localhost:3"),
    ],
)
def test_the_groups_get_the_addresses_of_all_lighthouses(
    options: list[str], addresses: str, groups: Groups, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options, __file__]) == 0
    assert groups.lighthouses == addresses
    assert f"lighthouse{'s' if options else ''}: {addresses}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "found", "status", "starts"),
    [
        ([], 69, 0, True),
        (["--check", "name"], 0, 0, True),
        (["--check", "name"], 69, 0, True),
        (["--check", "refuse"], 0, 0, True),
        (["--check", "refuse"], 69, 69, False),
        pytest.param(["--check", "refuse"], 1, 1, False, id="the check cannot be made"),
    ],
)
def test_a_bad_host_is_named_or_refused(
    options: list[str],
    found: int,
    status: int,
    starts: bool,
    groups: Groups,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks: list[tuple[str, int]] = []

    def check(lighthouse: str, *, nodes: int) -> int:
        checks.append((lighthouse, nodes))
        return found

    monkeypatch.setattr(run, "check", check)
    monkeypatch.setenv("TORCHFT_NODE_NAME", "here")
    assert main(["run", *options, __file__]) == status
    assert groups.calls == (["kill"] if starts else [])
    # The lighthouse, which is told of a bad host, serves no other one.
    assert checks == ([("http://localhost:1", 1)] if options else [])
    assert ("node here is not used (--check refuse)" in capsys.readouterr().err) is not starts


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("signals", "echo_sec", "status", "calls"),
    [
        ([INT], 0.0, 130, ["end", "ended", "kill"]),
        ([TERM], 0.0, 143, ["end", "ended", "kill"]),
        pytest.param([HUP], 0.0, 129, ["end", "ended", "kill"], id="the terminal is closed"),
        pytest.param([HUP, HUP], 0.0, 129, ["end", "ended", "kill"], id="the kernel and the shell report it"),
        pytest.param(
            [INT, INT], 3600.0, 130, ["end", "ended", "kill"], id="a wrapper forwards the terminal's"
        ),
        pytest.param([INT, INT], 0.0, 130, ["end", "kill"], id="Ctrl-C, and later once more"),
        pytest.param([TERM, TERM], 0.0, 143, ["end", "kill"], id="at once"),
        pytest.param([INT, TERM], 3600.0, 143, ["end", "kill"], id="another signal"),
    ],
)
def test_a_signal_ends_the_groups(
    signals: list[signal.Signals],
    echo_sec: float,
    status: int,
    calls: list[str],
    groups: Groups,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_ECHO_SEC", echo_sec)
    signal.signal(HUP, signal.default_int_handler)  # the default of the kernel would end this process
    groups.signals = signals
    assert main(["run", __file__]) == status
    assert groups.calls == calls


@pytest.mark.parametrize(
    ("number", "now", "first", "expected"),
    [
        (INT, 10.0, {}, False),
        (INT, 10.0, {INT: 10.0}, True),
        (INT, 10.9, {INT: 10.0}, True),
        (INT, 11.0, {INT: 10.0}, False),
        (INT, 10.1, {TERM: 10.0}, False),
        (TERM, 10.1, {INT: 9.0, TERM: 10.0}, True),
        (HUP, 99.0, {HUP: 10.0}, True),
    ],
)
def test_a_repeated_signal_that_was_meant_once(
    number: int, now: float, first: dict[int, float], expected: bool
) -> None:
    assert run.is_echo(number, now, first) is expected


def test_a_terminal_that_fails_before_its_signal_ends_the_groups(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(run.StatusLines, "show", show)
    signal.signal(HUP, signal.default_int_handler)
    # The output fails before the first, so only the second one arrives: while they end.
    groups.signals = [HUP, HUP]
    assert main(["run", __file__]) == 129
    assert groups.calls == ["end", "ended", "kill"]
    assert "the output cannot be written (Input/output error): ending the groups" in capsys.readouterr().err


def test_under_nohup_a_closed_terminal_ends_nothing(groups: Groups) -> None:
    signal.signal(HUP, signal.SIG_IGN)
    groups.signals = [HUP]
    assert main(["run", __file__]) == 0
    assert groups.calls == ["kill"]
