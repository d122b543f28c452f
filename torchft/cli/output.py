"""The standard output of a command."""

from __future__ import annotations

import contextlib
import os
import sys


def write_no_more() -> None:
    """Drops what is not written yet, which Python would write at the end and report the error again."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no output, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """Replaces control characters by ``?``: a name that a client chose could control the terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def duration_text(seconds: float) -> str:
    """A duration, as on the lighthouse's page."""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} d"
