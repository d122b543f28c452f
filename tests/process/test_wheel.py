"""The wheel of `make wheel`, in an environment that has only PyTorch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
import torch

from torchft.launch import process_tree

ROOT = Path(__file__).resolve().parents[2]
# Removes from the environment the paths to this repository, and the variables of the make that runs the
# tests.
ENVIRONMENT = {"PYTHONPATH": "", "MAKEFLAGS": "", "MAKELEVEL": ""}

# Run first, so that even a short run of `make test-all` tests the wheel that users install.
pytestmark = [pytest.mark.slow(first=True), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if Path(sys.prefix).resolve() != ROOT / ".venv":
        pytest.skip("`make wheel` builds with what is in .venv, and this is another environment")
    folder = tmp_path_factory.mktemp("dist")
    run("make", "wheel", f"DIST={folder}", cwd=ROOT, seconds=800)
    (path,) = folder.glob("*.whl")  # uv adds a .gitignore
    return path


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the commands of a new environment with the wheel. PyTorch and its dependencies are
    borrowed from this one.
    """
    new = tmp_path_factory.mktemp("new")
    venv.create(new, with_pip=True)
    pip = [new / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    run(*pip, "--no-index", "--no-deps", wheel, cwd=new)
    (packages,) = new.glob("lib/python3*/site-packages")
    # The borrowed folder is searched after the new environment's own packages. Its .pth files, which point to
    # this repository, do not apply.
    (packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return new / "bin"


def run(*command: str | Path, cwd: Path, seconds: float = 200) -> str:
    """Returns the output of a command, which must succeed."""
    env = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_name_contains_the_platform(wheel: Path) -> None:
    assert re.fullmatch(r"torchft-[\d.]+-cp310-abi3-manylinux[\w.]+\.whl", wheel.name)


def test_the_example_trains_with_the_wheel(commands: Path, tmp_path: Path) -> None:
    example = (ROOT / "python" / "examples" / "minimal.py").read_text()
    (tmp_path / "minimal.py").write_text(f"{example}\nimport torchft; print('used', torchft.__file__)\n")
    command = [
        commands / "torchft",
        "run",
        "--replicas",
        "2",
        "--min-replicas",
        "2",
        "--log-dir",
        "logs",
        "minimal.py",
    ]
    log = tmp_path / "output"
    job = process_tree.start([*map(str, command)], log, ENVIRONMENT, cwd=tmp_path)
    try:
        status = job.wait(200)
    finally:
        process_tree.kill_tree(job)
    output = "\n".join(path.read_text() for path in [log, *(tmp_path / "logs").iterdir()])
    assert status == 0, output
    used = re.findall(r"^used (.+)$", output, re.MULTILINE)
    assert len(used) == 2 and all(Path(path).is_relative_to(commands.parent) for path in used), output


def test_its_lighthouse_serves_and_its_doctor_reaches_it(commands: Path, tmp_path: Path) -> None:
    log = tmp_path / "output"
    serve = [str(commands / "torchft_lighthouse"), "--min_replicas", "1", "--bind", "127.0.0.1:0"]
    lighthouse = process_tree.start(serve, log, ENVIRONMENT, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"listening on: (\S+)\n", log.read_text())):
            assert lighthouse.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        output = run(commands / "torchft", "doctor", "--quick", "--lighthouse", found[1], cwd=tmp_path)
        assert "the lighthouse answers" in output and "the native library loads" in output, output
        lighthouse.terminate()
        assert lighthouse.wait(20) == 0, log.read_text()
    finally:
        process_tree.kill_tree(lighthouse)
