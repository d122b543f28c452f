"""``torchft kill`` and ``torchft drain``: end a replica group, at once or at the end of a step."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence

from torchft._lighthouse_http import HttpLighthouse, Unanswered
from torchft.cli.arguments import Parser, ask_of, duration, nearest
from torchft.cli.output import printable

_LOOK_SEC = 0.2


def kill(arguments: Sequence[str]) -> int:
    parser = _parser(
        "kill", "Ends one replica group at once. The others lose the step in progress, and continue."
    )
    args = parser.parse_args(arguments)
    return _end("kill", args, None)


def drain(arguments: Sequence[str]) -> int:
    parser = _parser(
        "drain",
        "Lets one replica group leave at the end of a step, without a loss for the others. Its script must "
        "end when Manager.draining() returns True, as in train_ddp.py.",
    )
    parser.add_argument(
        "--wait",
        type=duration,
        nargs="?",
        const=600.0,
        metavar="TIME",
        help="wait until it has left, at most TIME (10m)",
    )
    args = parser.parse_args(arguments)
    return _end("drain", args, args.wait)


def _parser(command: str, about: str) -> Parser:
    parser = Parser(prog=f"torchft {command}", description=about)
    ask_of(parser)
    parser.add_argument("replica_id", help="replica id as in `torchft status`, or the beginning of it")
    return parser


def _end(what: str, args: Namespace, wait: float | None) -> int:
    lighthouse = HttpLighthouse(args.lighthouse, args.job)
    replica_id = meant(args.replica_id, _known(lighthouse))
    print(printable(f"{replica_id}: {lighthouse.ask(what, replica_id=replica_id)}"), flush=True)
    if wait is None:
        return 0
    deadline = time.monotonic() + wait
    while replica_id in _known(lighthouse):
        if time.monotonic() > deadline:
            raise Unanswered(
                f"{replica_id} is still there after {wait:g} s; does its script check draining()?"
            )
        time.sleep(_LOOK_SEC)
    print(printable(f"{replica_id}: has left"))
    return 0


def _known(lighthouse: HttpLighthouse) -> list[str]:
    return [member["replica_id"] for member in lighthouse.get("/status")["members"]]


def meant(name: str, known: list[str]) -> str:
    """The group with a name, or its beginning. Unanswered: no group matches, or several do."""
    meant = [name] if name in known else [other for other in known if name and other.startswith(name)]
    if len(meant) != 1:
        why = f"begins {len(meant)} names" if meant else f"is no group{nearest(name, known)}"
        raise Unanswered(f"{name!r} {why}; there are: {', '.join(known) or 'none'}")
    return meant[0]
