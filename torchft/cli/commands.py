"""The entry point of ``torchft``: chooses the command and its exit status."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import torchft
from torchft._lighthouse_http import Unanswered
from torchft.cli.arguments import nearest
from torchft.cli.output import printable, write_no_more

_ABOUT = """\
Per-step fault tolerance for PyTorch training.

commands:
{commands}

`torchft COMMAND --help` describes each command.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs a command. Returns the exit status: 0, 1 if it failed, 2 if it was not understood, 130 after
    Ctrl-C (`run` also 143 after SIGTERM, and 129 after SIGHUP).
    """
    if sys.stdout is None:  # it was closed by the shell (`>&-`)
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            return _chosen(arguments)
        finally:
            sys.stdout.flush()  # at the end of the process an error of it could not be handled
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        write_no_more()
        return 1
    except OSError as e:
        if e.errno != errno.ENOSPC or e.filename is not None:
            raise
        write_no_more()
        print(f"torchft: the output cannot be written: {e.strerror}", file=sys.stderr)
        return 1


def _chosen(arguments: Sequence[str]) -> int:
    names = list(_COMMANDS)
    about = _ABOUT.format(commands="\n".join(f"  {name:12}{text}" for name, (text, _) in _COMMANDS.items()))
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(f"usage: torchft COMMAND ...\n\n{about}", end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"torchft {torchft.__version__}")
        return 0
    name, *rest = arguments
    if name not in _COMMANDS:
        print(
            f"torchft: {name!r} is no command{nearest(name, names)}; there are {', '.join(names)}",
            file=sys.stderr,
        )
        return 2
    try:
        return _COMMANDS[name][1](rest)
    except Unanswered as e:
        print(printable(f"torchft {name}: {e}"), file=sys.stderr)
        return 1


def _lighthouse(arguments: Sequence[str]) -> int:
    from torchft._torchft import lighthouse_main

    sys.argv = ["torchft lighthouse", *arguments]
    lighthouse_main()
    return 0


def _exec(arguments: Sequence[str]) -> int:
    from torchft.launch import exec as start

    start.main(arguments)


def _in(module: str, function: str = "main") -> Callable[[Sequence[str]], int]:
    """A command in a module of this package, which is imported only when the command is used."""
    return lambda arguments: getattr(importlib.import_module(f"torchft.cli.{module}"), function)(arguments)


_COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "run": ("a lighthouse and replica groups of a script, on this machine", _in("run")),
    "exec": ("one rank, as a fork of a process that has imported PyTorch", _exec),
    "scale": ("change the number of groups of a running job, or let it follow the speed", _in("scale")),
    "lighthouse": ("the lighthouse alone (as torchft_lighthouse)", _lighthouse),
    "status": ("the groups of a job, and why there is no quorum", _in("status")),
    "events": ("the events of a job: groups that joined, left or failed, and when", _in("events")),
    "snapshots": ("the copies of a job's state in the memory of each host", _in("snapshots")),
    "keeper": ("keep the snapshots of this host in memory when trainers end", _in("keeper")),
    "cluster": ("the lighthouses of a cluster, and changes of its members", _in("cluster")),
    "drain": ("let one replica group leave at the end of a step", _in("ending", "drain")),
    "kill": ("end one replica group at once", _in("ending", "kill")),
    "doctor": ("find problems of this machine and of its connection to the lighthouse", _in("doctor")),
}
