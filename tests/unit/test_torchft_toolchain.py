"""Building without a required tool: the first line of the error names the tool to install and its version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLCHAIN = ROOT / "python" / "build" / "toolchain.py"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with the only commands in PATH: Python and a shell, but no go and no gcc."""
    for command in ("sh", "bash", "make", "find", "sed"):
        found = shutil.which(command)
        assert found is not None, command
        (tmp_path / command).symlink_to(found)
    (tmp_path / "python3").symlink_to(sys.executable)
    return tmp_path


def command(path: Path, name: str, script: str) -> None:
    (path / name).write_text(f"#!/bin/sh\n{script}\n")
    (path / name).chmod(0o755)


def complaint(path: Path, *arguments: str, **environment: str) -> str:
    """Returns the first line of a failing build."""
    env = {k: v for k, v in os.environ.items() if k not in ("GO", "CC", "PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        arguments or [sys.executable, str(TOOLCHAIN)],
        env={**env, "PATH": str(path), **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0, done.stdout
    return done.stdout.splitlines()[0]


def test_without_go(path: Path) -> None:
    assert complaint(path).startswith("torchft: install Go 1.26 or newer")
    assert complaint(path, "make", "build").startswith("torchft: install Go 1.26 or newer")
    assert complaint(path, sys.executable, "setup.py", "build_ext").startswith(
        "torchft: install Go 1.26 or newer"
    )


def test_with_an_old_go(path: Path) -> None:
    command(path, "go", "echo go1.25.9")
    line = complaint(path)
    assert line.startswith("torchft: install Go 1.26 or newer")
    assert "go1.25.9" in line


def test_with_a_wrong_go_variable(path: Path) -> None:
    command(path, "go", "echo go1.26.0")
    assert "GO=/no/such/go" in complaint(path, GO="/no/such/go")


def test_without_gcc(path: Path) -> None:
    command(path, "go", "echo go1.26.0")
    assert complaint(path).startswith("torchft: install gcc 9 or newer")
    assert complaint(path, "make", "build").startswith("torchft: install gcc 9 or newer")


def test_with_an_old_gcc(path: Path) -> None:
    command(path, "go", "echo go1.26.0")
    command(path, "gcc", 'case "$1" in --version) echo "gcc (GCC) 8.3.0" ;; *) echo 8.3.0 ;; esac')
    line = complaint(path)
    assert line.startswith("torchft: install gcc 9 or newer")
    assert "gcc 8.3.0" in line


def test_without_python(path: Path) -> None:
    (path / "python3").unlink()
    assert complaint(path, "make", "build").startswith("torchft: install Python 3.10 or newer")


def test_without_python_headers(path: Path, tmp_path: Path) -> None:
    command(path, "go", "echo go1.26.0")
    command(path, "gcc", "echo 12.2.0")
    line = complaint(path, TORCHFT_PYTHON_INCLUDE=str(tmp_path))
    assert line.startswith("torchft: install the headers of Python 3.")
    assert str(tmp_path) in line
