"""The native libraries of the package, and why one of them does not load."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent


def load(name: str) -> Any:
    """Imports a native library.

    Raises:
        ImportError: it does not load; the message names the remedy.
    """
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ImportError(f"torchft's native library does not load ({e}): {_remedy()}") from e


def _remedy() -> str:
    for entry in sys.path:
        installed = Path(entry).resolve() / PACKAGE.name
        if installed != PACKAGE and built(installed):
            return hidden(PACKAGE, installed)
    return "build it with `pip install .`, or with `pip install -e .` to run from a checkout"


def hidden(sources: Path, installed: Path) -> str:
    """Says that Python imports a folder of sources in place of the installed package, and what to do."""
    return (
        f"the source folder {sources} hides the package that is installed in {installed}, because it lies beside the "
        f"script or in the current directory: start from another folder, or build it with `pip install -e "
        f"{sources.parent}`"
    )


def built(package: Path) -> bool:
    """Whether a folder has the package with its libraries."""
    return any(package.glob("_torchft_go*.so"))
