"""The native libraries of the package, and why one of them does not load."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent


def load(name: str) -> Any:
    """Imports a native library. ImportError: it does not load; the message names the remedy."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ImportError(f"torchft's native library does not load ({e}): {_remedy()}") from e


def _remedy() -> str:
    for entry in sys.path:
        installed = Path(entry).resolve() / PACKAGE.name
        if installed != PACKAGE and built(installed):
            why, way_out = _hiding(PACKAGE.parent, _script(), Path.cwd())
            return f"{hidden(PACKAGE, installed)}, because it {why}: {way_out}, or {in_place(PACKAGE.parent)}"
    return "build it with `pip install .`, or with `pip install -e .` to run from a checkout"


def _script() -> Path | None:
    """The script that this process runs, whose folder comes first in Python's path; None with ``python -m``,
    ``-c`` or a prompt, for which the current directory comes first.
    """
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return Path(path).resolve() if path and main.__spec__ is None else None


def _hiding(folder: Path, script: Path | None, here: Path) -> tuple[str, str]:
    """Why Python finds the sources in a folder before the installed package, and what to do."""
    if script is not None and script.parent == folder:
        return f"lies beside the script {script.name}", "copy the script to another folder"
    if script is None and here == folder:
        return "is in the current directory", "start from another folder"
    return f"comes first in Python's path ({folder})", "remove that folder from PYTHONPATH"


def hidden(sources: Path, installed: Path) -> str:
    """Says that Python imports a folder of sources in place of the installed package."""
    return f"the source folder {sources} hides the package that is installed in {installed}"


def in_place(folder: Path) -> str:
    """How to build the sources in a folder, so that they load there, with what scripts beside them need."""
    return f"build it in place with `pip install -e {shlex.quote(f'{folder}[train]')}`"


def built(package: Path) -> bool:
    """Whether a folder has the package with its libraries."""
    return any(package.glob("_torchft_go*.so"))
