"""The ``torchft`` command: run a job on this machine, look at one anywhere, find out what is wrong.

Nothing here imports torch, so that every command starts at once; only ``torchft doctor`` looks whether it loads.
"""

from __future__ import annotations

import sys

from torchft.cli.main import main

__all__ = ["main"]


def entry() -> None:
    """The entry point of the installed command."""
    sys.exit(main(sys.argv[1:]))
