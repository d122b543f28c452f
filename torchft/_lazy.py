"""Lazy imports (PEP 562): names of a package are imported on first use, so that its import is cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def resolver(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Returns a ``__getattr__`` for a package.

    Args:
        package: the package's ``__name__``.
        names: for each exported name its place, "module.name" below the package.
    """

    def resolve(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, attribute = names[name].rpartition(".")
        value = getattr(importlib.import_module(f"{package}.{module}"), attribute)
        setattr(sys.modules[package], name, value)
        return value

    return resolve
