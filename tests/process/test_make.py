"""The Makefile: the commands and messages of its setup, without installing anything; and Ctrl-C ends the
processes that it starts.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ours_path, processes_of

from torchft.launch import process_tree

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "torchft/_torchft_go.abi3.so"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def recipes(venv: Path, *arguments: str) -> list[str]:
    """The commands that make would run for a missing environment; with pip, as on most machines."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MAKEFLAGS", "MAKELEVEL", "TORCH_INDEX")
    }
    command = ["make", "-n", f"VENV={venv}", "UV=", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def where(pattern: str, lines: list[str]) -> int:
    (found,) = [i for i, line in enumerate(lines) if re.search(pattern, line)]
    return found


def test_the_size_of_the_download_is_printed_before_it_starts(tmp_path: Path) -> None:
    lines = recipes(tmp_path / "venv", "train")
    printed_at = where(r"echo .* \d GB to download, .* GB on disk", lines)
    (figures,) = re.findall(r"\S+ GB to download, \S+ GB on disk", lines[printed_at])
    assert figures in " ".join((ROOT / "docs" / "run.md").read_text().split())
    assert CPU_INDEX in lines[printed_at], "and how to download less"
    assert printed_at < min(i for i, line in enumerate(lines) if "pip install" in line)


def test_pytorch_comes_from_the_index_that_is_asked_for(tmp_path: Path) -> None:
    lines = recipes(tmp_path / "venv", "train", f"TORCH_INDEX={CPU_INDEX}")
    from_index = where(rf"pip install .*--index-url {CPU_INDEX} torch$", lines)
    assert from_index < where(r"pip install .*--editable '\.\[train\]'", lines), (
        "which then finds PyTorch installed"
    )
    assert "--constraint" not in lines[from_index], (
        "an index of PyTorch has few versions of the other packages"
    )
    assert where(rf"echo .*PyTorch comes from {CPU_INDEX}", lines) < from_index
    assert not any("GB to download" in line for line in lines)
    assert not any("--index-url" in line for line in recipes(tmp_path / "venv", "train"))


def test_the_setup_shows_its_progress(tmp_path: Path) -> None:
    """pip hides the output of builds. Go's first build takes minutes, so a separate step, which says so, runs
    it before pip.
    """
    lines = recipes(tmp_path / "venv", "train", f"LIBRARY={tmp_path / 'library.so'}")
    package = where(r"pip install .*--editable", lines)
    assert "--quiet" not in lines[package], "pip shows what it downloads"
    assert where(r"setup\.py .*build_ext", lines) < package


def test_an_environment_gets_the_go_and_the_compiler_that_the_machine_lacks(tmp_path: Path) -> None:
    lines = recipes(tmp_path / "venv", "build")
    required = where(r"pip install .*'setuptools>=77' \$\(\S+ python/build/toolchain\.py requires\)", lines)
    assert where(r"-m venv ", lines) < required < where(r"pip install .*--editable", lines)


def test_a_linter_that_is_not_installed_is_a_failure(tmp_path: Path) -> None:
    lines = recipes(tmp_path / "venv", "lint-go")
    recipe = lines[where("gofmt -l", lines)]
    done = subprocess.run(
        ["/bin/sh", "-c", recipe], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 127 and "gofmt" in done.stderr
    assert "gofmt -w" not in done.stderr, "no file is to blame"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment that make considers complete, with the Python and the torchft of this process."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    for name, arguments in (("python", '"$@"'), ("torchft", '-m torchft.cli "$@"')):
        command = folder / "bin" / name
        command.write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        command.chmod(0o755)
    (folder / "with-train").touch()
    return folder


@pytest.mark.parametrize(("length", "status"), [(72, 0), (73, 2)])
def test_a_long_subject_of_a_commit_is_a_failure(length: int, status: int, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True, timeout=60)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "s" * length], check=True, timeout=60)
    shutil.copy(ROOT / "Makefile", tmp_path)
    done = subprocess.run(["make", "lint-commits"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert ("s" * length in done.stderr) == (status != 0)


@pytest.mark.slow  # test_torchft_run.py ends the command with Ctrl-C
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("target", "running"),
    [
        pytest.param("train", r"^group 0 .* training", id="train"),
        pytest.param("minimal", r"^group 0 .* starting", id="minimal"),
    ],
)
def test_ctrl_c_ends_everything(target: str, running: str, venv: Path, tmp_path: Path) -> None:
    log = tmp_path / "output"
    # With -o, make considers the build up to date.
    command = ["make", f"VENV={venv}", "-o", str(venv / "with-train"), "-o", LIBRARY, target]
    env = {
        "PYTHONPATH": str(ours_path()),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "MAKEFLAGS": "",
    }
    make = process_tree.start(command, log, env, cwd=ROOT)
    try:
        deadline = time.monotonic() + 120
        # make, the command, the lighthouse and two agents at least
        while not re.search(running, log.read_text(), re.M) or len(process_tree.tree(make.pid)) < 5:
            assert make.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        # To the whole process group, as a terminal does, so make gets it too.
        os.killpg(make.pid, signal.SIGINT)
        assert make.wait(60) != 0
        # The keeper outlives the job for a minute, and ends with its folder.
        shutil.rmtree(os.environ["TORCHFT_SNAPSHOT_MEMORY"])
        deadline = time.monotonic() + 60
        while left := processes_of(tmp_path):
            assert time.monotonic() < deadline, f"{left} are left\n{log.read_text()}"
            time.sleep(0.05)
        output = log.read_text()
        assert (
            re.search("interrupted; the logs|SIGINT: ending the groups", output) and "Traceback" not in output
        )
    finally:
        process_tree.kill_tree(make)
        for folder in set(re.findall(r"^logs: (torchft-logs/\S+)$", log.read_text(), re.M)):
            shutil.rmtree(ROOT / folder)
