"""Builds torchft._torchft_go, the one native library: Go, its generated binding and csrc/, as a c-shared
library for CPython's stable ABI. Everything else about the package is in pyproject.toml.
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


class BuildGo(build_ext):
    """Runs `go build`; Go's own cache makes a second build take seconds."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # Go does not notice edits to C files outside its packages, but it does notice other flags.
        sources = sorted((ROOT / "csrc").iterdir())
        csrc = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]
        flags = ["-O2", f"-I{toolchain.python_include()}", f"-DTORCHFT_CSRC=0x{csrc}", os.environ.get("CGO_CFLAGS", "")]
        env = {
            **os.environ,
            "CGO_ENABLED": "1",
            "CC": " ".join(toolchain.compiler()),
            "CGO_CFLAGS": " ".join(flags).strip(),
        }
        command = [toolchain.go(), "build", "-buildmode=c-shared", "-mod=readonly", "-buildvcs=false", "-trimpath"]
        command += ["-ldflags=-s -w", "-o", str(target), "./native"]
        if subprocess.run(command, cwd=ROOT / "go", env=env).returncode != 0:
            sys.exit(f"torchft: the native library did not build; the command was, in go/: {' '.join(command)}")
        header = target.name.removesuffix(target.suffix) + ".h"  # a by-product of c-shared; nobody includes it
        target.with_name(header).unlink(missing_ok=True)


BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
if BUILDS & set(sys.argv):
    try:
        toolchain.check()
    except toolchain.Missing as missing:
        sys.exit(str(missing))

setup(
    ext_modules=[Extension("torchft._torchft_go", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildGo},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
