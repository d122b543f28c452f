"""``torchft waive``: declares to a lighthouse of a list that missing groups have ended, after plausibility checks."""

from __future__ import annotations

import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from torchft._lighthouse_http import Lighthouse, Unanswered
from torchft.cli.arguments import Parser, ask_of
from torchft.cli.ending import meant
from torchft.cli.status import printable

_CONNECT_SEC = 3.0
_UNKNOWN_JOB = 404
_FORCE = "--risk-two-histories"

_RISK = """\
You confirm that these groups have ended: {names}; and that no group that was in a later quorum with them still trains.
If one does, at another lighthouse of the list, the job has two histories, and the steps of one of them are lost."""

Status = Mapping[str, Any]  # a lighthouse's answer at /status


@dataclass(frozen=True)
class Other:
    """Another lighthouse of the list: its status, or why it did not answer. Both are None if that lighthouse does not
    know the job.
    """

    address: str
    status: Status | None = None
    unanswered: str | None = None


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="torchft waive",
        description="With several lighthouses: lets the waiting groups continue without the groups whose votes are "
        "missing. The missing groups must have ended, and no group that was in a later quorum with them may train at "
        "any lighthouse: otherwise the job gets two histories, and the steps of one of them are lost. The command "
        "checks this with the other lighthouses of the list and the managers of the missing groups. It refuses if one "
        "of them contradicts, or a lighthouse does not answer. `torchft status` shows whose votes are missing.",
    )
    ask_of(parser)
    parser.add_argument("replica_id", nargs="+", help="replica id as in `torchft status`, or the beginning of it")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        _FORCE,
        action="store_true",
        help="continue although groups may train elsewhere: the job may get two histories, and lose the steps of one",
    )
    args = parser.parse_args(arguments)
    try:
        lighthouse, status, others = _look(args)
        missing = status["missing_votes"]
        names = [meant(name, missing) for name in args.replica_id]
        against = objections(status, others, _accepts)
        if against and not args.risk_two_histories:
            raise Unanswered(f"{'; '.join(against)}. If you know better, add {_FORCE}")
        for objection in against:
            print(printable(f"although {objection}"), flush=True)
        print(printable(_RISK.format(names=", ".join(names))), flush=True)
        if not args.yes and not _agreed():
            raise Unanswered("nothing was done")
        for name in names:
            print(printable(lighthouse.ask("waive", name)), flush=True)
    except (Unanswered, ValueError) as e:
        print(printable(f"torchft waive: {e}"), file=sys.stderr)
        return 1
    return 0


def objections(status: Status, others: Sequence[Other], accepts: Callable[[str], bool]) -> list[str]:
    """Evidence that a missing group has not ended, or that a group of the job may be at another lighthouse.

    Args:
        status: status of the lighthouse that lacks votes.
        others: all others of the list.
        accepts: whether a process accepts connections at the address of a group's manager. A host that does not
            answer, or an unknown address, is no evidence in either direction; the operator has to know.
    """
    against = []
    addresses = {member["replica_id"]: member.get("address", "") for member in status.get("members", [])}
    for name in status["missing_votes"]:
        if (address := addresses.get(name)) and accepts(address):
            against.append(f"{name} has not ended: its manager accepts connections at {address}")
    for other in others:
        if other.unanswered is not None:
            against.append(f"groups may train at {other.address}, which does not answer: {other.unanswered}")
        if other.status is None:
            continue
        alive = [member["replica_id"] for member in other.status.get("members", []) if member["healthy"]]
        given = other.status.get("given_votes", [])
        if alive:
            against.append(f"{', '.join(alive)} may train at {other.address}: end them first")
        if other.status.get("quorum_id", 0) > status.get("quorum_id", 0):
            against.append(f"{other.address} knows a later quorum: waive its votes there, where its groups wait")
        if given:
            against.append(f"{other.address} has votes of groups that ended there: restart {', '.join(given)} first")
    return against


def _look(args: Namespace) -> tuple[Lighthouse, Status, list[Other]]:
    """Returns the first lighthouse that lacks votes, its status, and all others.

    Votes are waived at one lighthouse only: a vote given at two lighthouses would count in two histories.

    Raises:
        Unanswered: none answers, or none lacks a vote.
    """
    chosen: Lighthouse | None = None
    chosen_status: Status = {}
    others = []
    for address in Lighthouse(args.lighthouse, args.job).addresses:
        one = Lighthouse(address, args.job)
        try:
            status = one.get("/status")
        except Unanswered as e:
            others.append(Other(address, unanswered=None if e.code == _UNKNOWN_JOB else str(e)))
            continue
        if chosen is None and status.get("missing_votes"):
            chosen, chosen_status = one, status
        else:
            others.append(Other(address, status))
    if chosen is None:
        raise Unanswered("no lighthouse that answers misses a vote; `torchft status` says what the groups wait for")
    return chosen, chosen_status, others


def _accepts(address: str) -> bool:
    parts = urlsplit(address)
    if not parts.hostname or not parts.port:
        return False
    try:
        socket.create_connection((parts.hostname, parts.port), timeout=_CONNECT_SEC).close()
    except OSError:  # the host refuses the connection, or does not answer
        return False
    return True


def _agreed() -> bool:
    try:
        return input("Type yes to continue: ").strip() == "yes"
    except EOFError:
        return False
