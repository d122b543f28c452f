"""Compiles the test device once for all test processes: a library in build/late, under a digest of its
inputs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
FOLDER = Path(__file__).resolve().parents[2] / "build" / "late"
# -O1 compiles in two thirds of the time of -O2. The tests are as fast, because they spend most of their time
# in PyTorch.
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")
UNITS = ("late", "backend")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


def library() -> Path:
    """Returns the path of the library for this source, compiler, Python and PyTorch. The first caller
    compiles it.

    Raises:
        RuntimeError: there is no C++ compiler, or the compilation failed.
    """
    compiler = os.environ.get("CXX") or "g++"
    digest = hashlib.sha256(repr((compiler, FLAGS, sys.version, torch.__version__, torch.__file__)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    made = FOLDER / digest.hexdigest()[:16] / "_late.so"
    if made.exists():
        return made
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            _compile(compiler, made)
    return made


def _compile(compiler: str, made: Path) -> None:
    if shutil.which(compiler) is None:
        raise RuntimeError(
            f"late: the test device needs a C++ compiler: install g++, or set CXX; no {compiler!r} on PATH"
        )
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    # Linked under another name and then renamed: an interrupted build leaves no file that looks complete.
    made.parent.mkdir(exist_ok=True)
    partial = made.with_suffix(".partial")
    objects = [made.with_name(f"{unit}.o") for unit in UNITS]
    include_flags = ["-DTORCH_EXTENSION_NAME=_late", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    include_flags += [f"-I{folder}" for folder in include]
    _run(
        [
            compiler,
            *FLAGS,
            *include_flags,
            "-c",
            str(SOURCES / f"{unit}.cpp"),
            "-o",
            str(made.with_name(f"{unit}.o")),
        ]
        for unit in UNITS
    )
    link = [compiler, "-shared", *map(str, objects), "-o", str(partial), f"-L{root / 'lib'}"]
    _run([[*link, *(f"-l{name}" for name in LIBRARIES), f"-Wl,-rpath,{root / 'lib'}"]])
    for path in objects:
        path.unlink()
    partial.rename(made)


def _run(commands: Iterable[list[str]]) -> None:
    """Runs the commands in parallel, and waits for all of them.

    Raises:
        RuntimeError: a command failed; the message has the end of its error output.
    """
    running = [
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    outputs = [process.communicate()[1] for process in running]
    for process, errors in zip(running, outputs):
        if process.returncode != 0:
            raise RuntimeError(
                f"late: {process.args[0]} failed with status {process.returncode}:\n{errors[-10000:]}"
            )
