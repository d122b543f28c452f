"""``torchft keeper``: keeps the snapshots of this host's ranks in memory when trainers end."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from datetime import timedelta

from torchft._keeper import ROOT_ENV, root
from torchft.cli.arguments import Parser, duration
from torchft.launch import process_tree

_ABOUT = """\
Keeps the snapshots of the ranks on this host in memory when their trainers end, serves them to ranks on
other hosts, and tells the lighthouses of its jobs what it has. `torchft run` and jobs with snapshots start
it. Start it yourself, as a service or a side container, where all processes of a job are killed together.

It ends by SIGTERM, and by itself when it has had nothing to keep for a minute; the snapshots stay. One runs
for each user and host: a second one says which, and ends.
"""
_WRITER = "torchft.checkpointing.snapshots.writer"


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="torchft keeper", description=_ABOUT)
    parser.add_argument(
        "--root",
        metavar="DIR",
        help=f"folder of the snapshots (environment: {ROOT_ENV}; /dev/shm/torchft-UID)",
    )
    parser.add_argument(
        "--bind",
        default="",
        metavar="HOST:PORT",
        help="address to listen on (a free port; of this host alone while the lighthouse is on it)",
    )
    parser.add_argument(
        "--keep",
        type=duration,
        default=24 * 3600.0,
        metavar="TIME",
        help="how long to keep the snapshots of a job after its last trainer has ended (24h)",
    )
    args = parser.parse_args(arguments)
    from torchft._torchft import keep

    try:
        folder = args.root or str(root())
        keep(
            folder,
            args.bind,
            timedelta(seconds=args.keep),
            _writer(),
            lambda: print(f"Keeper of {folder}", flush=True),
        )
    except TimeoutError as e:
        print(f"torchft keeper: {e}")
    except (ValueError, OSError, RuntimeError) as e:
        print(f"torchft keeper: {e}", file=sys.stderr)
        return 2 if isinstance(e, ValueError) else 1
    return 0


def _writer() -> list[str]:
    """The command that writes snapshots to disk; without PyTorch there is none to read them."""
    if importlib.util.find_spec("torch") is None:
        return []
    return process_tree.python(f"import runpy; runpy.run_module({_WRITER!r}, run_name='__main__')")
