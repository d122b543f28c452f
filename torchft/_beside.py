"""Other installations that are imported as torchft, too."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable

# How pip names the folder with the metadata of upstream's nightly.
UPSTREAM, METADATA = "torchft_nightly-", ".dist-info"


def others(package: str, version: str, path: Iterable[str]) -> list[str]:
    """Says what else is installed under the name of a package, and how to change which one is imported.

    Args:
        package: the folder of the package that is imported, a real path.
        version: its version.
        path: Python's path.
    """
    home, name = os.path.split(package)
    found = []
    for folder in dict.fromkeys(os.path.realpath(entry) for entry in path):
        other = os.path.join(folder, name)
        if other != package and os.path.isfile(os.path.join(other, "__init__.py")):
            found.append(
                f"`import {name}` is torchft {version} in {package}, and hides another one in {other}: "
                f"put {folder} first in PYTHONPATH to import that one, or `pip uninstall torchft` where it "
                "is not wanted"
            )
    entries: list[str] = []
    with contextlib.suppress(OSError):  # a folder that may be searched only
        entries = sorted(os.listdir(home))
    for entry in entries:
        if entry.startswith(UPSTREAM) and entry.endswith(METADATA):
            nightly = entry[len(UPSTREAM) : -len(METADATA)]
            found.append(
                f"torchft {version} and torchft-nightly {nightly} are both in {package}, which mixes their "
                "files: `pip uninstall torchft torchft-nightly`, then install one of them, or each in an "
                "environment of its own"
            )
    return found


def warn(package: str, version: str) -> None:
    """Warns of each other installation."""
    for text in others(os.path.realpath(package), version, sys.path):
        warnings.warn(text, RuntimeWarning, stacklevel=3)
