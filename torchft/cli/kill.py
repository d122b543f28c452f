"""``torchft kill``: end a replica group."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchft._security import tokens
from torchft.cli.arguments import Parser, nearest
from torchft.cli.lighthouse_http import LIGHTHOUSE_ENV, Lighthouse, Unanswered


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="torchft kill", description="Ends one replica group; the others go on.")
    parser.add_argument("--lighthouse", metavar="ADDRESS", help=f"http://host:port (environment: {LIGHTHOUSE_ENV})")
    parser.add_argument("replica_id", help="as `torchft status` shows it, or the beginning of it")
    args = parser.parse_args(arguments)
    try:
        lighthouse = Lighthouse(args.lighthouse)
        known = [member["replica_id"] for member in lighthouse.get("/status")["members"]]
        meant = [name for name in known if name == args.replica_id or name.startswith(args.replica_id)]
        if args.replica_id in known:
            meant = [args.replica_id]
        if len(meant) != 1:
            why = f"begins {len(meant)} names" if meant else f"is no group{nearest(args.replica_id, known)}"
            raise Unanswered(f"{args.replica_id!r} {why}; there are: {', '.join(known) or 'none'}")
        print(lighthouse.kill(meant[0], next(iter(tokens()), None)))
    except (Unanswered, ValueError) as e:
        print(f"torchft kill: {e}", file=sys.stderr)
        return 1
    return 0
