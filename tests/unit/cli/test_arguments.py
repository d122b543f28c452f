"""Command line arguments, and the answers to invalid ones."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchft.cli import main
from torchft.cli.arguments import duration, positive, replicas


@pytest.mark.parametrize(
    ("text", "seconds"), [("10", 10.0), ("10s", 10.0), ("1.5m", 90.0), ("500ms", 0.5), ("2h", 7200.0)]
)
def test_a_duration(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1s", "10 s", "ten", "1d", "1e3s", "inf", "nan"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed: a time above 0"):
        duration(text)


@pytest.mark.parametrize(("text", "counts"), [("1", (1, 1)), ("2", (2, 2)), ("2:8", (2, 8)), ("3:3", (3, 3))])
def test_numbers_of_replicas(text: str, counts: tuple[int, int]) -> None:
    assert replicas(text) == counts


@pytest.mark.parametrize("text", ["0", "", "-1", "2:", ":2", "8:2", "0:3", "two", "1:2:3"])
def test_invalid_numbers_of_replicas(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="N:MAX"):
        replicas(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", ""])
def test_values_that_are_not_positive(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
        positive(text)


def exits(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as e:
        return int(e.code or 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["statsu"], "'statsu' is no command (did you mean status?); there are run,"),
        (["drian"], "'drian' is no command (did you mean drain?)"),
        (["xyzzy"], "'xyzzy' is no command; there are run,"),
        (["run"], "the following arguments are required: script\n"),
        (
            ["run", "--replica", "2", "x.py"],
            "--replica is not understood (did you mean --replicas?); see torchft run --help",
        ),
        (["run", "--replicas", "0", "x.py"], "argument --replicas: '0' is not allowed; allowed: N or N:MAX"),
        (
            ["run", "--kill-every", "often", "x.py"],
            "'often' is not allowed; allowed: a time above 0 like 500ms",
        ),
        (["run", "--kill-every", "-3s", "x.py"], "'-3s' is not allowed; allowed: a time above 0 like 500ms"),
        (
            ["run", "--nproc-per-node", "-1", "x.py"],
            "'-1' is not allowed; allowed: a whole number of at least 1",
        ),
        (["run", "missing/train.py"], "script 'missing/train.py' is no file, and there is no folder missing"),
        (
            ["run", "--replicas", "2", "--min-replicas", "3", __file__],
            "--min-replicas 3 is not allowed; allowed: at most",
        ),
        (
            ["run", "--lighthouses", "2", __file__],
            "argument --lighthouses: '2' is not allowed; allowed: 1, 3, 5 or 7",
        ),
        (
            ["run", "--lighthouses", "9", __file__],
            "argument --lighthouses: '9' is not allowed; allowed: 1, 3, 5 or 7",
        ),
        (
            ["run", "--lighthouses", "3", "--bind", "localhost:1", __file__],
            "--bind localhost:1 is not allowed with --lighthouses 3, which take free ports; allowed: "
            "--lighthouses 1",
        ),
        (["cluster", "grow", "http://d:1"], "invalid choice: 'grow'"),
        (["cluster", "add"], "the address of the lighthouse to add is missing; see torchft cluster --help"),
        (["scale", "none"], "'none' is not allowed; allowed: a whole number"),
        (["scale", "8:2"], "'8:2' is not allowed; allowed: a whole number"),
        (
            ["scale", "2:8"],
            "a range needs --kubernetes or --slurm; a job of `torchft run` takes it at its start",
        ),
        (["scale", "2:8", "--slurm"], "--slurm needs the script of the tasks"),
        (
            ["scale", "auto", "--kubernetes", "j"],
            "auto is not allowed with --kubernetes and --slurm; allowed: N",
        ),
        (["run", "--scale", "down", __file__], "argument --scale: invalid choice: 'down'"),
        (
            ["run", "--replicas", "2", "--scale", "auto", __file__],
            "--scale auto is not allowed with --replicas 2; allowed: --replicas N:MAX",
        ),
        (
            ["run", "--replicas", "2:8", "--sizes", "2/4", __file__],
            "--sizes 2/4 is not allowed without --scale auto",
        ),
        (
            ["run", "--replicas", "2:8", "--scale", "auto", "--sizes", "2/9", __file__],
            "--sizes='2/9': 9 is outside of 2:8",
        ),
        (
            ["run", "--replicas", "2:8", "--scale", "auto", "--min-replicas", "3", __file__],
            "--min-replicas 3 is not allowed; allowed: at most --replicas (2)",
        ),
        (["status", "--lighthous", "x"], "(did you mean --lighthouse?)"),
    ],
)
def test_invalid_arguments_end_with_2_and_a_reason(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(arguments) == 2
    assert expected in capsys.readouterr().err


def test_a_missing_script_gets_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train_mine.py").touch()
    assert exits(["run", str(tmp_path / "train_mien.py")]) == 2
    assert "did you mean train_mine.py?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["status", "--lighthouse", "localhost:29510"],
            "'localhost:29510' is not allowed; allowed: http://host:port",
        ),
        # A port above 65535, which a socket would reduce modulo 65536.
        (
            ["status", "--lighthouse", "http://localhost:99999"],
            "'http://localhost:99999' is not allowed; allowed: http://",
        ),
        (
            ["status", "--lighthouse", "http://localhost:x"],
            "'http://localhost:x' is not allowed; allowed: http://host",
        ),
        (
            ["status", "--lighthouse", "http://localhost"],
            "'http://localhost' is not allowed; allowed: http://host:port",
        ),
        # {0} and {1} stand for ports that refuse connections.
        (
            ["status", "--lighthouse", "http://127.0.0.1:{0}"],
            "no lighthouse answered (http://127.0.0.1:{0}: [Errno 111] Connection refused); is it running",
        ),
        (
            ["kill", "--lighthouse", "http://127.0.0.1:{0},http://127.0.0.1:{1}", "a"],
            "http://127.0.0.1:{1}: ",
        ),
        (["status", "--lighthouse", "http://node..x:29510"], "no lighthouse answered (http://node..x:"),
    ],
)
def test_a_missing_lighthouse_ends_with_1_and_names_the_addresses_tried(
    arguments: list[str], expected: str, closed_ports: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits([argument.format(*closed_ports) for argument in arguments]) == 1
    assert expected.format(*closed_ports) in capsys.readouterr().err


def test_help_names_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # that of the lighthouse replaces it
    assert exits(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in ("run", "scale", "lighthouse", "status", "events", "drain", "kill", "cluster", "doctor"):
        assert f"\n  {command} " in listed
        assert exits([command, "--help"]) == 0
        assert command in capsys.readouterr().out


@pytest.mark.parametrize(("command", "unbuffered"), [("--help", ""), ("--help", "1"), ("run --help", "")])
def test_a_reader_that_has_closed_the_pipe_is_no_error_of_python(command: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "torchft.cli", *command.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["--version", f"run --log-dir {{}} {__file__}"])
def test_a_full_disk_is_a_line(command: str, unbuffered: str, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torchft.cli", *command.format(tmp_path).split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    expected = "torchft: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert exits(["--version"]) == 0
    with sys.stdout as replaced:
        assert not replaced.isatty(), "commands may ask it"


def test_underscores_count_as_hyphens_and_arguments_after_the_script_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchft.cli import run

    seen = []
    monkeypatch.setattr(run, "_run", lambda args: seen.append(args) or 0)
    assert (
        exits(
            ["run", "--nproc_per_node=2", "--kill_every", "10s", __file__, "--replicas", "9", "--lr_min", "1"]
        )
        == 0
    )
    (args,) = seen
    assert (args.nproc_per_node, args.kill_every, args.replicas) == (2, 10.0, (2, 2))
    assert args.script_args == ["--replicas", "9", "--lr_min", "1"]
