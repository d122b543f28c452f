"""What a build needs, and what the build backend asks for in place of a tool that is missing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "python" / "build"
sys.path.insert(0, str(BUILD))
import backend  # noqa: E402
import compilation  # noqa: E402
import toolchain  # noqa: E402
from toolchain import ANY, CC, GO, Missing, Tool, chosen, unsupported  # noqa: E402

OLD_GO, NEW_GO = (["/old/go"], (1, 25, 9)), (["/new/go"], (1, 26))
OLD_GCC, NEW_GCC, CLANG = (["gcc"], (8, 3, 0)), (["gcc"], (9,)), (["clang"], ANY)
NO_HEADERS, ZIG = (["gcc"], ()), (["/zig", "cc"], ANY)
Found = tuple[list[str], tuple[int, ...]]


@pytest.mark.parametrize(
    ("tool", "found", "command"),
    [
        (GO, [], None),
        (GO, [OLD_GO], None),
        (GO, [NEW_GO], ["/new/go"]),
        (GO, [OLD_GO, NEW_GO], ["/new/go"]),  # the package's, in place of an old one on PATH
        (CC, [], None),
        (CC, [OLD_GCC], None),
        (CC, [NO_HEADERS], None),
        (CC, [NEW_GCC, CLANG], ["gcc"]),
        (CC, [OLD_GCC, CLANG], ["clang"]),
        (CC, [NO_HEADERS, ZIG], ["/zig", "cc"]),
    ],
)
def test_what_is_found_decides_what_is_required(
    tool: Tool, found: list[Found], command: list[str] | None
) -> None:
    assert chosen(tool, "", found) == command


@pytest.mark.parametrize(
    ("tool", "wanted", "found", "error"),
    [
        (GO, "/no/go", [], "install Go 1.26 or newer .* or set GO; GO=/no/go is no command"),
        (GO, "/old/go", [OLD_GO], "install Go 1.26 or newer .* or set GO; /old/go is 1.25.9"),
        (CC, "gcc", [OLD_GCC], "install gcc 9 or newer .* or set CC; gcc is 8.3.0"),
        (CC, "gcc", [NO_HEADERS], "install gcc 9 or newer .* apt install gcc libc6-dev.* gcc does not work"),
    ],
)
def test_a_tool_that_was_asked_for_has_no_substitute(
    tool: Tool, wanted: str, found: list[Found], error: str
) -> None:
    with pytest.raises(Missing, match=f"^torchft: {error}"):
        chosen(tool, wanted, found)


@pytest.mark.parametrize(
    ("python", "system", "glibc", "gil", "why"),
    [
        ((3, 10), "Linux", (2, 28), True, None),
        ((3, 9, 18), "Linux", (2, 36), True, "Python 3.10 or newer; .* is Python 3.9.18"),
        ((3, 12), "Darwin", (), True, "use Linux, .* this is macOS"),
        ((3, 12), "Windows", (), True, "use Linux, .* this is Windows"),
        ((3, 12), "Linux", (), True, r"glibc 2.28 or newer, .*\(musl, in Alpine"),
        ((3, 12), "Linux", (2, 17), True, "glibc 2.28 or newer, .* has glibc 2.17"),
        ((3, 14), "Linux", (2, 36), False, "a Python with the GIL"),
    ],
)
def test_a_platform_that_cannot_run_it_is_refused(
    python: tuple[int, ...], system: str, glibc: tuple[int, ...], gil: bool, why: str | None
) -> None:
    told = unsupported(python, system, glibc, gil)
    assert told is None if why is None else re.search(why, told or "")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with the only commands in PATH: Python and a shell, but no go and no gcc."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in ("sh", "bash", "make", "find", "sed"):
        found = shutil.which(command)
        assert found is not None, command
        (folder / command).symlink_to(found)
    (folder / "python3").symlink_to(sys.executable)
    return folder


def command(path: Path, name: str, script: str) -> None:
    (path / name).write_text(f"#!/bin/sh\n{script}\n")
    (path / name).chmod(0o755)


def run(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("GO", "CC", "PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        arguments,
        env={**env, "PATH": str(path), **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


def hook(path: Path, name: str = "get_requires_for_build_wheel", **environment: str) -> tuple[int, str]:
    """The status and the last line of a hook of the backend, where neither package is installed."""
    program = f"import backend, toolchain; toolchain._packaged = lambda *_: None; print(*backend.{name}())"
    done = run(path, sys.executable, "-c", program, **{"PYTHONPATH": str(BUILD), **environment})
    return done.returncode, done.stdout.splitlines()[-1] if done.stdout.strip() else ""


def test_the_backend_asks_for_what_is_missing(path: Path) -> None:
    assert hook(path) == (0, f"{GO.package} {CC.package}")
    command(path, "go", "echo go1.25.9")
    assert hook(path, "get_requires_for_build_editable") == (0, f"{GO.package} {CC.package}")
    command(path, "go", "echo go1.26.0")
    assert hook(path) == (0, CC.package)
    command(path, "gcc", 'case "$1" in --version) echo "gcc (GCC) 8.3.0" ;; *) echo 8.3.0 ;; esac')
    assert hook(path) == (0, CC.package)
    command(path, "gcc", "echo 12.2.0")
    assert hook(path) == (0, "")
    assert hook(path, TORCHFT_WHEEL_FOR="aarch64") == (0, CC.package)


def test_the_backend_refuses(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(path, "go", "echo go1.26.0")
    status, told = hook(path, GO="/no/such/go")
    assert status == 1 and "GO=/no/such/go is no command" in told
    assert hook(path, TORCHFT_WHEEL_FOR="vax") == (
        1,
        "torchft: TORCHFT_WHEEL_FOR=vax is not allowed; allowed: x86_64, aarch64",
    )
    monkeypatch.setattr(toolchain, "unsupported", lambda *_: "use Linux; this is macOS")
    with pytest.raises(SystemExit, match=r"^torchft: use Linux; this is macOS\.$"):
        backend.get_requires_for_build_wheel()


def test_a_read_only_source_is_built_elsewhere_but_not_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SystemExit, match=r"^torchft: use `pip install \.`; .* which is read-only"):
        backend.get_requires_for_build_editable()


def test_upstreams_nightly_in_the_environment_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tmp_path / "torchft_nightly-2026.10.26.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchft-nightly\nVersion: 2026.10.26\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    told = f"^torchft: torchft-nightly 2026.10.26 is installed in {tmp_path}.* both are imported as `torchft`"
    with pytest.raises(SystemExit, match=told):
        backend.get_requires_for_build_wheel()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1\n")
    assert backend.beside(importlib.metadata.distributions(path=[str(tmp_path)])) is None


def test_a_build_without_the_backend_names_what_to_install(path: Path) -> None:
    line = run(path, sys.executable, "setup.py", "build_ext").stdout.splitlines()[0]
    assert line.startswith("torchft: install Go 1.26 or newer") and line.endswith("no go on PATH.")
    command(path, "go", "echo go1.26.0")
    line = run(path, sys.executable, "setup.py", "build_ext").stdout.splitlines()[0]
    assert line.startswith("torchft: install gcc 9 or newer") and "'ziglang" in line


def test_without_python(path: Path) -> None:
    (path / "python3").unlink()
    told = run(path, "make", "build").stdout.splitlines()[0]
    assert told.startswith("torchft: install Python 3.10 or newer")


NOWHERE = "/dev/null/nothing"  # root may write anywhere else


def test_caches_that_cannot_be_in_the_home_folder_are_temporary(tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("needs Go")
    names = {"GOCACHE", "GOMODCACHE", "ZIG_GLOBAL_CACHE_DIR"}
    base = {"PATH": os.environ["PATH"], "GOENV": "off", "GOFLAGS": "-p=1"}

    def moved(**environment: str) -> set[str]:
        env = compilation.environment({**base, **environment}, go, tmp_path / "scratch")
        changed = {name for name in names if env.get(name) == str(tmp_path / "scratch" / name)}
        assert env["GOFLAGS"] == ("-p=1 -modcacherw" if changed else "-p=1")
        return changed

    assert moved(HOME=str(tmp_path)) == set()
    assert moved(HOME=NOWHERE) == moved() == names
    assert moved(HOME=NOWHERE, XDG_CACHE_HOME=str(tmp_path)) == {"GOMODCACHE"}
    assert moved(HOME=str(tmp_path), GOCACHE=NOWHERE) == {"GOCACHE"}


def test_a_build_under_pip_tells_the_terminal_how_far_it_is() -> None:
    terminal, end = os.openpty()
    # In a session of its own, the terminal that a process opens first is its own.
    program = "import os, sys, compilation; os.open(sys.argv[1], os.O_RDWR); compilation.say('half is done')"
    command = [sys.executable, "-c", program, os.ttyname(end)]
    env = {**os.environ, "PYTHONPATH": str(BUILD)}
    done = subprocess.run(
        command, env=env, start_new_session=True, capture_output=True, text=True, timeout=60
    )
    os.set_blocking(terminal, False)
    told = os.read(terminal, 1000)
    os.close(terminal)
    os.close(end)
    assert done.stdout == "half is done\n", done.stderr
    assert b"half is done\r\n" in told


def test_the_settings_of_other_go_projects_do_not_matter(tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("needs Go")
    env = compilation.environment({**os.environ, "GOROOT": "/old/go", "GOWORK": "/a/go.work"}, go, tmp_path)
    assert "GOROOT" not in env and env["GOWORK"] == "off" and env["GOTOOLCHAIN"] == "local"


@pytest.mark.parametrize("reached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_go_modules_come_from_the_proxy_that_is_named(reached: bool, tmp_path: Path) -> None:
    go = shutil.which("go")
    if go is None:
        pytest.skip("needs Go")
    cached = subprocess.run(
        [go, "env", "GOMODCACHE"], capture_output=True, text=True, timeout=60
    ).stdout.strip()
    proxy = f"file://{cached}/cache/download" if reached else "off"
    program = "import os, compilation; print(len(compilation._packages(dict(os.environ))))"
    env = {"GOPROXY": proxy, "GOMODCACHE": str(tmp_path), "GOFLAGS": "-modcacherw", "PYTHONPATH": str(BUILD)}
    env |= {"GONOSUMDB": "*", "GOTOOLCHAIN": "local"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if reached:
        assert done.returncode == 0 and int(done.stdout.splitlines()[-1]) > 100, done.stderr
    else:
        assert done.returncode == 1
        assert (
            "torchft: Go could not fetch the modules that go/go.mod names; its error is above." in done.stderr
        )
        assert "HTTPS_PROXY" in done.stderr and "GOPROXY" in done.stderr and "make wheel" in done.stderr
