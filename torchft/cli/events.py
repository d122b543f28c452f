"""``torchft events``: the past events of a job, and new ones as they happen."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from torchft._lighthouse_http import HttpLighthouse, Unanswered
from torchft.cli.arguments import Parser, ask_of
from torchft.cli.output import printable

_AGAIN_SEC = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="torchft events",
        description="Changes of the quorum, failures and kills, the oldest first; in a cluster since its "
        "leader leads.",
    )
    ask_of(parser)
    parser.add_argument("--follow", action="store_true", help="continue with new events as they happen")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    args = parser.parse_args(arguments)
    lighthouse = HttpLighthouse(args.lighthouse, args.job)
    for event in _followed(lighthouse) if args.follow else lighthouse.get("/api/v1/history")["events"]:
        print(json.dumps(event) if args.json else words(event), flush=True)
    return 0


def _followed(lighthouse: HttpLighthouse) -> Iterator[dict[str, Any]]:
    """Yields events forever. A broken stream is reopened at the same position.

    Raises:
        Unanswered: the first stream could not be opened.
    """
    last, opened = 0, False
    while True:
        try:
            for name, data in lighthouse.stream(f"/api/v1/events?after={last}"):
                opened = True
                if name == "whole" and data["last"] < last:
                    last = 0  # another lighthouse numbers its events from the start
                    print("torchft events: another lighthouse leads; its events follow", file=sys.stderr)
                for event in data["events"] if name == "whole" else [data] if name == "event" else []:
                    if event["id"] > last:
                        last = event["id"]
                        yield event
        except Unanswered:
            if not opened:
                raise
        time.sleep(_AGAIN_SEC)


# What is said of the members that an event names, by its kind.
_OF_MEMBERS = {
    "drained": "{} is to leave at the end of a step",
    "ended": "{} left",
    "failed": "{} failed",
    "killed": "{} left",
    "quorum": "{} left",
    "refused": "{} was refused",
    "stalled": "the others wait for {}",
    "straggler": "{} is slower than the others",
}
# Of events of these kinds the reason says it all.
_ONLY_REASON = ("bad_node", "corrupted", "regressed", "scaled", "skipped", "stopped", "waiting")
_RECOVERIES = ("healed", "recovered")


def words(event: dict[str, Any]) -> str:
    """Formats an event as one line, and its stacks below it."""
    when = datetime.fromisoformat(event["time"].replace("Z", "+00:00")[:19] + "+00:00").astimezone()
    kind, reason = event["kind"], event.get("reason")
    parts = []
    if kind == "stacks":
        parts.append(event["who"])
        reason = f"{reason}\n{event['stacks']}"
    if kind in _RECOVERIES:
        parts.append(_recovery(event))
    if event.get("joined"):
        parts.append(f"{', '.join(event['joined'])} joined")
    if event.get("left") and kind not in _ONLY_REASON:
        # a lighthouse of a later version may send further kinds
        parts.append(_OF_MEMBERS.get(kind, "{}").format(", ".join(event["left"])))
    if kind == "quorum":
        members = event.get("members", 0)
        train = "1 group trains" if members == 1 else f"{members} groups train"
        parts.append(f"{train} from step {event.get('step', 0)}")
    if reason:
        parts.append(reason)
    return _line(when, event, parts)


def _line(when: datetime, event: dict[str, Any], parts: list[str]) -> str:
    text = f"{when:%Y-%m-%d %H:%M:%S}  {event['kind']:9} {'; '.join(parts)}"
    return "\n".join(printable(line) for line in text.split("\n"))


def _recovery(event: dict[str, Any]) -> str:
    """Formats the duration of a recovery, and its seconds by phase."""
    phases = [phase for phase in event.get("phases", []) if phase["phase"] != "total"]
    where = ", ".join(
        f"{phase['phase']} {phase['seconds']:.2f} s" for phase in phases if phase["seconds"] >= 0.005
    )
    took = f"{sum(phase['seconds'] for phase in phases):.2f} s" + (f" ({where})" if where else "")
    if event["kind"] == "healed":
        gb, step = event.get("bytes", 0) / 1e9, event.get("step", 0)
        return f"{event['who']} took over {gb:.3f} GB of step {step}: {took}"
    lost = event.get("steps_lost", 0)
    return f"{event['who']} and the others go on, {lost} step{'' if lost == 1 else 's'} lost: {took}"
