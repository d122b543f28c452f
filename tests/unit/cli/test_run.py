"""`torchft run` that cannot start says why in a line; a signal ends its groups."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchft.cli import main, run


class Groups:
    """Groups that were started; they run until they are killed."""

    def __init__(self, *_: Any) -> None:
        self.members: list[Any] = []
        self.calls: list[str] = []
        self.signals: list[signal.Signals] = []  # the first arrives while they run, further ones while they end

    def run(self, show: Callable[[Groups], None], *_: Any) -> None:
        show(self)
        for number in self.signals[:1]:
            signal.raise_signal(number)

    def end(self, grace: float) -> None:
        self.calls.append("end")
        for number in self.signals[1:]:
            signal.raise_signal(number)

    def kill(self) -> None:
        self.calls.append("kill")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Groups]:
    @contextlib.contextmanager
    def lighthouse(*_: Any) -> Iterator[tuple[str, Any]]:
        yield "http://localhost:1", None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(run, "watched_lighthouse", lighthouse)
    started = Groups()
    monkeypatch.setattr(run, "LocalJob", lambda *_: started)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield started
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("folder", ["taken", "taken/logs"])
def test_a_log_folder_that_cannot_be_made(folder: str, groups: Groups, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").touch()
    assert main(["run", "--log-dir", folder, __file__]) == 1
    assert f"torchft run: logs cannot be written to the folder {folder!r}: " in capsys.readouterr().err
    assert groups.calls == []


def test_a_folder_that_cannot_be_written_names_the_option(groups: Groups, capsys: pytest.CaptureFixture[str]) -> None:
    Path("torchft-logs").touch()  # as in a folder that is read-only: the folder cannot be made
    assert main(["run", __file__]) == 1
    assert "the folder 'torchft-logs': File exists; choose a folder with --log-dir\n" in capsys.readouterr().err
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
        f"torchft run: `torchft scale` cannot reach this job: {tmp_path / 'torchft'} must be a folder that only this "
        "user can enter"
    ) in capsys.readouterr().err
    assert groups.calls == ["kill"]


INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("signals", "status"),
    [
        ([INT], 130),
        ([TERM], 143),
        pytest.param([HUP], 129, id="the terminal is closed"),
        pytest.param([HUP, HUP], 129, id="the kernel and the shell report it"),
        pytest.param([TERM, TERM], 143, id="at once"),
    ],
)
def test_a_signal_ends_the_groups(signals: list[signal.Signals], status: int, groups: Groups) -> None:
    signal.signal(HUP, signal.default_int_handler)  # the default of the kernel would end this process
    groups.signals = signals
    assert main(["run", __file__]) == status
    assert groups.calls == ["end", "kill"]


def test_a_terminal_that_fails_before_its_signal_ends_the_groups(
    groups: Groups, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(run.Progress, "show", show)
    assert main(["run", __file__]) == 129
    assert groups.calls == ["end", "kill"]
    assert "the output cannot be written (Input/output error): ending the groups" in capsys.readouterr().err


def test_under_nohup_a_closed_terminal_ends_nothing(groups: Groups) -> None:
    signal.signal(HUP, signal.SIG_IGN)
    groups.signals = [HUP]
    assert main(["run", __file__]) == 0
    assert groups.calls == ["kill"]
