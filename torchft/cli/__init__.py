"""The ``torchft`` command: runs a job on this machine, shows the state of any job, and diagnoses problems.

Nothing here imports torch, so that every command starts at once; ``torchft doctor`` imports it in another
process.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torchft._lazy import resolver

if TYPE_CHECKING:
    from torchft.cli.commands import main as main

__all__ = ["main"]

__getattr__ = resolver(__name__, {"main": "commands.main"})


def entry() -> None:
    """The entry point of the installed command."""
    if sys.argv[1:2] == ["exec"]:  # each restart of a rank waits for its start: nothing else is imported
        from torchft.launch import exec as start

        start.main(sys.argv[2:])
    from torchft.cli.commands import main

    sys.exit(main(sys.argv[1:]))
