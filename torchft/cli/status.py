"""``torchft status``: the members of the job, and why there is no quorum."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from torchft._lighthouse_http import HttpLighthouse, Unanswered
from torchft.cli.arguments import Parser, ask_of, duration
from torchft.cli.cluster import summary
from torchft.cli.events import words
from torchft.cli.output import printable

_WAIT_MS = 1000  # at least; short steps differ by more than their median


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="torchft status", description="The replica groups that a lighthouse knows.")
    ask_of(parser)
    parser.add_argument(
        "--watch",
        type=duration,
        nargs="?",
        const=1.0,
        metavar="TIME",
        help="show it again at this interval (1s)",
    )
    parser.add_argument("--json", action="store_true", help="print the lighthouse's JSON")
    args = parser.parse_args(arguments)
    lighthouse = HttpLighthouse(args.lighthouse, args.job)
    shown = _look(lighthouse, args.json)
    while True:
        if args.watch and sys.stdout.isatty():
            print("\x1b[H\x1b[J", end="")
        print(shown, flush=True)
        if not args.watch:
            return 0
        time.sleep(args.watch)
        try:
            shown = _look(lighthouse, args.json)
        except Unanswered as e:  # the lighthouse may be restarting
            shown = json.dumps({"error": str(e)}) if args.json else printable(str(e))


def _look(lighthouse: HttpLighthouse, as_json: bool) -> str:
    status = lighthouse.get("/status")
    return json.dumps(status) if as_json else table(status)


def table(status: dict[str, Any]) -> str:
    """Formats the status of a lighthouse as a table."""
    members = status["members"]
    head = f"quorum {status['quorum_id']}: {groups(len(status['quorum']))}, step {status['max_step']}"
    if status["quorum_id"] == 0:
        head = "no quorum yet"
    # In a healthy job the first to ask for the next quorum waits for the others, for less than a step.
    long_ms = max(_WAIT_MS, status.get("median_step_ms", 0))
    waiting = status["quorum_id"] == 0 or any(member.get("waiting_ms", 0) > long_ms for member in members)
    lines = [head, f"next: {status['reason']}"] if status["reason"] and waiting else [head]
    if status.get("stopped"):
        lines += [printable(line) for line in status["stopped"].splitlines()]
    if cluster := status.get("cluster"):
        lines.append(summary(cluster))
    lines += [words(event) for event in status.get("notices", [])]
    if not members:
        return "\n".join([*lines, "no replica group is known"])
    width = max(len("group"), *(len(printable(member["replica_id"])) for member in members))
    wide = max(9, *(len(state(member)) for member in members))
    lines += ["", f"{'group':{width}}  {'state':{wide}}  {'step':>9}  {'heard of':>9}  address"]
    for member in members:
        age = f"{member['heartbeat_age_ms'] / 1000:.1f} s"
        name, address = printable(member["replica_id"]), printable(member.get("address") or "")
        # The lighthouse knows the steps of the latest quorum, and of the requests for the next one.
        step = member["step"] if member["in_quorum"] or member["waiting"] else "-"
        lines.append(f"{name:{width}}  {state(member):{wide}}  {step:>9}  {age:>9}  {address}")
    return "\n".join(lines)


def groups(n: int) -> str:
    return f"{n} group{'' if n == 1 else 's'}"


def state(member: dict[str, Any]) -> str:
    """The state of a member in one word, as on the lighthouse's page, or what it does instead of training."""
    if member.get("draining") and (member["healthy"] or member.get("out")):
        return "draining"
    if not member["healthy"]:
        return "failed"
    for name in ("suspect", "stalled", "healing"):
        if member.get(name):
            return name
    if member["in_quorum"]:
        phase = member.get("phase")
        if phase in ("first_steps", "evaluation", "checkpoint"):
            return str(phase)
        return "straggler" if member.get("straggler") else "training"
    if member.get("standby"):
        return "standby"
    return "waiting" if member["waiting"] else "joining"
