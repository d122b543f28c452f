"""``torchft cluster``: the lighthouses of a cluster, and changes of its members."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torchft._lighthouse_http import HttpLighthouse, Unanswered, checked
from torchft._security import DEFAULT_JOB
from torchft.cli.arguments import Parser, ask_lighthouse
from torchft.cli.output import duration_text, printable

_CHANGE_SEC = 15.0  # a new member takes over the log before it counts

_ABOUT = """\
Shows the lighthouses of a cluster, or changes its members. To replace a host, remove its lighthouse, start
the new one with the list of its cluster, in which its own address takes the place of the old one, and add it.

  torchft cluster
  torchft cluster remove http://c:29510
  torchft cluster add http://d:29510
"""


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="torchft cluster", description=_ABOUT)
    ask_lighthouse(parser)
    parser.add_argument("--json", action="store_true", help="print the lighthouse's JSON")
    parser.add_argument("change", nargs="?", choices=["add", "remove"], help="what to do with ADDRESS")
    parser.add_argument(
        "address", nargs="?", metavar="ADDRESS", help="http://host:port of the lighthouse to change"
    )
    args = parser.parse_args(arguments)
    if args.change and not args.address:
        parser.error(f"the address of the lighthouse to {args.change} is missing; see {parser.prog} --help")
    if args.change:
        address = checked(args.address)
        lighthouse = HttpLighthouse(args.lighthouse, DEFAULT_JOB, timeout=_CHANGE_SEC)
        print(printable(f"{address}: {lighthouse.ask(f'cluster/{args.change}', address=address)}"))
    else:
        status = _look(args.lighthouse)
        print(json.dumps(status) if args.json else table(status))
    return 0


def _look(addresses: str | None) -> Mapping[str, Any]:
    """The cluster as its leader sees it or, if that does not answer, the first lighthouse that does."""
    status: Mapping[str, Any] = HttpLighthouse(addresses, DEFAULT_JOB).get("/cluster")
    if status["leader"] not in ("", status["self"]):
        with contextlib.suppress(Unanswered):
            return HttpLighthouse(status["leader"], DEFAULT_JOB).get("/cluster")
    return status


def table(status: Mapping[str, Any]) -> str:
    """Formats the status of a cluster."""
    own, members = printable(status["self"]), status["members"] or []
    width = max(len(text) for text in ("lighthouse", *(printable(member["address"]) for member in members)))
    lines = [summary(status), f"as seen by {own}", "", f"{'lighthouse':{width}}  state"]
    lines += [f"{printable(member['address']):{width}}  {_state(member)}" for member in members]
    if status["trouble"]:
        lines += ["", f"{own}: {printable(status['trouble'])}"]
    return "\n".join(lines)


def summary(status: Mapping[str, Any]) -> str:
    """Formats in one line which lighthouse leads, since when, and which others are not reached."""
    voters = [member for member in status["members"] or [] if member["voter"]]
    missing = [member["address"] for member in voters if not member["reached"]]
    since = duration_text(status["since_ms"] / 1000)
    if status["leader"]:
        text = (
            f"cluster: {status['leader']} has led {len(voters)} lighthouse{'' if len(voters) == 1 else 's'} "
            f"for {since}"
        )
    else:
        needed = (
            f"; {len(voters) // 2 + 1} of {len(voters)} lighthouses must reach each other" if voters else ""
        )
        text = f"cluster: no leader for {since}{needed}"
    return printable(text + (f"; not reached: {', '.join(missing)}" if missing else ""))


def _state(member: Mapping[str, Any]) -> str:
    if member["leads"]:
        return "leader"
    if not member["voter"]:
        return "not in the cluster"
    return "follower" if member["reached"] else "not reached"
