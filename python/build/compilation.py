"""Builds the two native libraries of the package with what toolchain.py finds, and says what takes long."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import toolchain

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
TELL_EACH_S = 10.0
# C takes a function that csrc/Python.h does not declare for one that returns int: the library does not load.
_DECLARED = "-Werror=implicit-function-declaration"


def build(target: Path, go: bool) -> None:
    """Builds the c-shared library of the Go core, its generated binding and csrc/, or the small one for
    processes that must not load Go.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        env = environment(os.environ, toolchain.go(), Path(scratch))
        if go:
            _build_go(target, env)
        else:
            _build_c(target, env)


def environment(base: Mapping[str, str], go: str, scratch: Path) -> dict[str, str]:
    """Returns the environment of the compilers. A cache that has no place in the home folder is put into
    `scratch`.
    """
    # Without what other projects in Go need: another Go's GOROOT, and a workspace around this folder.
    env = {name: value for name, value in base.items() if name != "GOROOT"}
    env |= {"CGO_ENABLED": "1", "GOTOOLCHAIN": "local", "GOWORK": "off"}
    if machine := toolchain.wheel_for():
        env |= {"GOOS": "linux", "GOARCH": toolchain.MACHINES[machine]}

    def of_go(name: str) -> str:
        return subprocess.run(
            [go, "env", name], env=env, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    caches = {name: of_go(name) for name in ("GOCACHE", "GOMODCACHE")}
    home = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME", ""), ".cache")
    caches["ZIG_GLOBAL_CACHE_DIR"] = env.get("ZIG_GLOBAL_CACHE_DIR") or os.path.join(home, "zig")
    if moved := [name for name, folder in caches.items() if not _usable(folder)]:
        # Go makes the modules read-only, and then they could not be removed.
        env |= {name: str(scratch / name) for name in moved}
        env["GOFLAGS"] = f"{env.get('GOFLAGS', '')} -modcacherw".strip()
    return env


def _usable(folder: str) -> bool:
    """Whether a folder is writable, or can be made."""
    if not os.path.isabs(folder):
        return False
    first = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    return first.is_dir() and os.access(first, os.W_OK | os.X_OK)


def say(text: str) -> None:
    """Prints a line, also to the terminal, if there is one: pip and uv hide what a build prints."""
    print(text, flush=True)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\r\x1b[K{text}\n")


def _build_go(target: Path, env: dict[str, str]) -> None:
    # Go does not notice edits to C files outside its packages, but it rebuilds if the flags differ. So the
    # flags contain a hash of those files.
    csrc = hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(CSRC.iterdir()))).hexdigest()[:16]
    env["CGO_CFLAGS"] = f"-O2 {_DECLARED} -DTORCHFT_CSRC=0x{csrc} {env.get('CGO_CFLAGS', '')}".strip()
    env["CC"] = shlex.join(toolchain.compiler())
    packages = _packages(env)
    say("torchft: compiling the native library: seconds, or up to three minutes if none of it is cached")
    flags = ["-v", "-buildmode=c-shared", "-mod=readonly", "-buildvcs=false", "-trimpath", "-ldflags=-s -w"]
    command = [toolchain.go(), "build", *flags, "-o", str(target), "./native"]
    compiled, told = 0, time.monotonic()
    with subprocess.Popen(command, cwd=ROOT / "go", env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # with -v, each package that is compiled
            if line.strip() not in packages:
                print(line, end="", file=sys.stderr, flush=True)
                continue
            compiled += 1
            if time.monotonic() - told >= TELL_EACH_S:
                told = time.monotonic()
                say(f"torchft: {compiled} of at most {len(packages)} packages are compiled")
    if process.returncode != 0:
        _failed(command, ROOT / "go")
    # A by-product of c-shared, which nothing includes.
    target.with_name(target.name.removesuffix(target.suffix) + ".h").unlink(missing_ok=True)


def _packages(env: dict[str, str]) -> set[str]:
    """Fetches the modules that Go has not cached, and returns the packages that the library is made of."""
    say("torchft: fetching the Go modules that are not cached, 27 MB at most")
    command = [toolchain.go(), "list", "-deps", "-mod=readonly", "./native"]
    listed = subprocess.run(command, cwd=ROOT / "go", env=env, stdout=subprocess.PIPE, text=True)
    if listed.returncode != 0:
        sys.exit(
            "torchft: Go could not fetch the modules that go/go.mod names; its error is above. Connect to a "
            "network, or name a proxy by HTTPS_PROXY, or one for modules by GOPROXY; or install a wheel that "
            "another machine has built (`make wheel`)."
        )
    return set(listed.stdout.split())


def _build_c(target: Path, env: dict[str, str]) -> None:
    sources = [str(CSRC / name) for name in ("isolated.c", "ending.c")]
    command = [
        *toolchain.compiler(),
        "-O2",
        _DECLARED,
        "-fPIC",
        "-shared",
        f"-I{CSRC}",
        *sources,
        "-ldl",
        "-o",
        str(target),
    ]
    if subprocess.run(command, cwd=ROOT, env=env).returncode != 0:
        _failed(command, ROOT)


def _failed(command: list[str], folder: Path) -> None:
    sys.exit(
        f"torchft: the native library did not build; the command was, in {folder}: {shlex.join(command)}"
    )
