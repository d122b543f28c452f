"""Builds the two native libraries, for CPython's stable ABI. torchft._torchft_go is a c-shared library of the
Go core, its generated binding and csrc/. torchft.process_group.isolated._native consists of csrc/isolated.c
and csrc/ending.c; it is for processes that must not load Go. Everything else about the package is in
pyproject.toml.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "python" / "build"))
import toolchain  # noqa: E402

GO_LIBRARY = "torchft._torchft_go"
C_LIBRARY = "torchft.process_group.isolated._native"


class Build(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        (build_go if ext.name == GO_LIBRARY else build_c)(target)


def build_go(target: Path) -> None:
    """Runs `go build`, whose cache makes a second build take seconds."""
    # Go does not notice edits to C files outside its packages, but it rebuilds if the flags differ. So the
    # flags contain a hash of those files.
    sources = sorted((ROOT / "csrc").iterdir())
    csrc = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    flags = [
        "-O2",
        f"-I{toolchain.python_include()}",
        f"-DTORCHFT_CSRC=0x{csrc}",
        os.environ.get("CGO_CFLAGS", ""),
    ]
    env = {
        **os.environ,
        "CGO_ENABLED": "1",
        "CC": " ".join(toolchain.compiler()),
        "CGO_CFLAGS": " ".join(flags).strip(),
    }
    command = [
        toolchain.go(),
        "build",
        "-buildmode=c-shared",
        "-mod=readonly",
        "-buildvcs=false",
        "-trimpath",
    ]
    command += ["-ldflags=-s -w", "-o", str(target), "./native"]
    _run(command, cwd=ROOT / "go", env=env)
    # A by-product of c-shared, which nothing includes.
    header = target.name.removesuffix(target.suffix) + ".h"
    target.with_name(header).unlink(missing_ok=True)


def build_c(target: Path) -> None:
    command = [*toolchain.compiler(), "-O2", "-fPIC", "-shared", "-DPy_LIMITED_API=0x030A0000"]
    # Symbols of Python are resolved when the library is loaded; Linux needs no flag for that.
    command += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    sources = [str(ROOT / "csrc" / name) for name in ("isolated.c", "ending.c")]
    command += [f"-I{toolchain.python_include()}", *sources, "-o", str(target)]
    _run(command, cwd=ROOT, env=dict(os.environ))


def _run(command: list[str], cwd: Path, env: dict[str, str]) -> None:
    if subprocess.run(command, cwd=cwd, env=env).returncode != 0:
        sys.exit(f"torchft: the native library did not build; the command was, in {cwd}: {' '.join(command)}")


BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
if BUILDS & set(sys.argv):
    try:
        toolchain.check()
    except toolchain.Missing as missing:
        sys.exit(str(missing))

setup(
    ext_modules=[Extension(name, sources=[], py_limited_api=True) for name in (GO_LIBRARY, C_LIBRARY)],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
