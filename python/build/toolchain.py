"""Checks for Python, Go and a C compiler before a build, so that the first line of an error names the missing
tool.

setup.py calls check(). `make` may run this file with an old Python, so it avoids newer syntax. With the
argument `include` it prints the folder of Python.h.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig

GO = (1, 26)
GCC = (9,)
PYTHON = (3, 10)


class Missing(Exception):
    """A tool that building torchft needs is missing or too old."""


def _output(*command):
    # GOTOOLCHAIN: go must not download a newer version.
    env = dict(os.environ, LC_ALL="C", GOTOOLCHAIN="local")
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _version(text):
    match = re.search(r"(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def _dotted(version):
    return ".".join(str(part) for part in version)


def python():
    """Returns the version of the running Python."""
    found = sys.version_info[:3]
    if found < PYTHON:
        raise Missing(
            "torchft: install Python {} or newer; {} is Python {}.".format(
                _dotted(PYTHON), sys.executable, _dotted(found)
            )
        )
    return found


def go():
    """Returns the path of the go command: the GO environment variable, else the first on PATH."""
    wanted = os.environ.get("GO") or "go"
    need = "torchft: install Go {} or newer (https://go.dev/dl), or set GO to its path; ".format(_dotted(GO))
    path = shutil.which(wanted)
    if path is None:
        raise Missing(
            need + ("no `go` on PATH." if wanted == "go" else "GO={} is no command.".format(wanted))
        )
    output = _output(path, "env", "GOVERSION")
    if output is None:
        raise Missing(need + "{} does not run.".format(path))
    if _version(output) < GO:
        raise Missing(need + "{} is {}.".format(path, output))
    return path


def compiler():
    """Returns the C compiler's command as a list: CC, else gcc, else clang."""
    wanted = os.environ.get("CC", "").split()
    need = "torchft: install gcc {} or newer (Debian, Ubuntu: apt install gcc libc6-dev), or set CC; ".format(
        _dotted(GCC)
    )
    command = wanted or [name for name in ("gcc", "clang") if shutil.which(name)][:1]
    if not command or shutil.which(command[0]) is None:
        raise Missing(
            need + ("CC={} is no command.".format(" ".join(wanted)) if wanted else "no `gcc` on PATH.")
        )
    output = _output(*(command + ["--version"])) or ""
    if "clang" in output:
        return command  # every version of clang is new enough
    dumped = _output(*(command + ["-dumpfullversion", "-dumpversion"]))
    if dumped is None or not _version(dumped):
        raise Missing(need + "{} does not print its version.".format(" ".join(command)))
    if _version(dumped) < GCC:
        raise Missing(need + "{} is gcc {}.".format(shutil.which(command[0]), dumped))
    return command


def python_include():
    """Returns the folder of Python.h: TORCHFT_PYTHON_INCLUDE, else that of the running Python."""
    include = os.environ.get("TORCHFT_PYTHON_INCLUDE") or sysconfig.get_paths()["include"]
    if not os.path.exists(os.path.join(include, "Python.h")):
        raise Missing(
            "torchft: install the headers of Python {} (Debian, Ubuntu: apt install python3-dev), or set "
            "TORCHFT_PYTHON_INCLUDE; no Python.h in {}.".format(_dotted(sys.version_info[:2]), include)
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise Missing("torchft: use a Python with the GIL; a free-threaded one cannot load its abi3 library.")
    return include


def check():
    """Raises Missing if a tool is missing or too old."""
    python()
    go()
    compiler()
    python_include()


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["include"]:
            print(python_include())
        else:
            check()
    except Missing as missing:
        sys.exit(str(missing))
