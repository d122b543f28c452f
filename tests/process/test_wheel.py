"""The package, installed from a wheel and from its sources, in an environment that has only PyTorch."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
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


def make_wheel(machine: str, folder: Path) -> Path:
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        pytest.skip("`make wheel` builds with what is in .venv, and this is another environment")
    run("make", "wheel", f"DIST={folder}", f"WHEELS={machine}", cwd=ROOT, seconds=800)
    (path,) = folder.glob("*.whl")  # uv adds a .gitignore
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wheel(platform.machine(), tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module", params=["wheel", pytest.param("sources", marks=pytest.mark.slow(minutes=4))])
def commands(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the commands of a new environment with the package. PyTorch and its dependencies are
    borrowed from this one. From its sources the package is installed with nothing on PATH, so no Go and gcc.
    """
    new = tmp_path_factory.mktemp("new")
    venv.create(new, with_pip=True)
    pip = [new / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    if request.param == "wheel":
        run(*pip, "--no-index", request.getfixturevalue("wheel"), cwd=new)
    else:
        sources = tmp_path_factory.mktemp("clone") / "torchft"
        ignored = shutil.ignore_patterns(".*", "build", "*.so", "__pycache__", "torchft-logs")
        for name in ("csrc", "go", "torchft", "python/build"):
            shutil.copytree(ROOT / name, sources / name, ignore=None if name == "python/build" else ignored)
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, sources)
        run(*pip, sources, cwd=new, seconds=800, PATH="/nothing", GO="", CC="")
    (packages,) = new.glob("lib/python3*/site-packages")
    # The borrowed folder is searched after the new environment's own packages. Its .pth files, which point to
    # this repository, do not apply.
    (packages / "borrowed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return new / "bin"


def run(*command: str | Path, cwd: Path, seconds: float = 200, **environment: str) -> str:
    """Returns the output of a command, which must succeed."""
    env = {**os.environ, **ENVIRONMENT, **environment}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_small_and_for_many_systems(wheel: Path) -> None:
    check(wheel, platform.machine(), tag=b"\x3e" if platform.machine() == "x86_64" else b"\xb7")


@pytest.mark.slow  # of another processor: nothing here can load it
def test_it_is_made_for_another_machine(tmp_path: Path) -> None:
    machine, tag = ("aarch64", b"\xb7") if platform.machine() == "x86_64" else ("x86_64", b"\x3e")
    check(make_wheel(machine, tmp_path), machine, tag)


def check(wheel: Path, machine: str, tag: bytes) -> None:
    """Checks that the libraries of a wheel are for a machine, by the number in their headers, and a glibc."""
    assert re.fullmatch(rf"torchft-[\d.]+-cp310-abi3-manylinux_2_28_{machine}\.whl", wheel.name)
    assert wheel.stat().st_size < 12e6
    with zipfile.ZipFile(wheel) as packed:
        libraries = [packed.read(name) for name in packed.namelist() if name.endswith(".abi3.so")]
    assert len(libraries) == 2
    for library in libraries:
        assert library[18:19] == tag
        versions = [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)\b", library)]
        assert versions and max(versions) <= 28


def test_the_example_trains_with_it(commands: Path, tmp_path: Path) -> None:
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
