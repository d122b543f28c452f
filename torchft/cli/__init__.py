"""The ``torchft`` command: runs a job on this machine, shows the state of any job, and diagnoses problems.

Nothing here imports torch, so that every command starts at once; ``torchft doctor`` imports it in another
process.
"""

from __future__ import annotations

import sys

from torchft.cli.main import main

__all__ = ["main"]


def entry() -> None:
    """The entry point of the installed command."""
    sys.exit(main(sys.argv[1:]))
