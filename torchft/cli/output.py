"""The standard output of a command."""

from __future__ import annotations

import contextlib
import os
import sys


def write_no_more() -> None:
    """Drops what is not written yet: Python writes it at the end of the process, and would report the error
    again.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no output, or it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """Replaces control characters by ``?``: any client may have chosen a name that would control the
    terminal.
    """
    return "".join(c if c.isprintable() else "?" for c in text)
