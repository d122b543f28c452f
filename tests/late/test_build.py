"""The device is compiled once. On a host that cannot compile it, the error names the cause."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.late import build

ROOT = Path(__file__).resolve().parents[2]


def test_concurrent_callers_get_one_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built, both_ask = [], threading.Barrier(2)

    def compile_one(compiler: str, made: Path) -> None:
        built.append(made)
        made.parent.mkdir()
        made.touch()

    def ask(_: int) -> Path:
        both_ask.wait(60)
        return build.library()

    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "_compile", compile_one)
    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(ask, range(2)))) == len(built) == 1
    assert build.library() == built[0]


@pytest.mark.parametrize("changed", ["CXX", "source", "torch"])
def test_the_librarys_name_depends_on_its_inputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: str
) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "late.cpp").write_text("1")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "_compile", lambda compiler, made: None)
    before = build.library()
    if changed == "CXX":
        monkeypatch.setenv("CXX", "clang++")
    elif changed == "source":
        (sources / "late.cpp").write_text("2")
    else:
        monkeypatch.setattr(build.torch, "__version__", "9.9")
    assert build.library() != before


def test_without_a_compiler_the_error_names_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        RuntimeError, match=r"needs a C\+\+ compiler: install g\+\+, or set CXX; no 'no-such-compiler'"
    ):
        build.library()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho the mistake >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "FOLDER", tmp_path / "build")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=r"failed with status 3:\nthe mistake"):
        build.library()
    assert not list((tmp_path / "build").rglob("*.so"))


# test_jobs.py trains on the device, test_processes.py kills a group.
@pytest.mark.slow
def test_the_example_runs_on_it() -> None:
    command = [
        sys.executable,
        "python/examples/demo.py",
        "--device",
        "late",
        "--steps",
        "60",
        "--",
        "--batch-size",
        "16",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stdout[-3000:] + done.stderr[-3000:]
