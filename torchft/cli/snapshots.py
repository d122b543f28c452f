"""``torchft snapshots``: the copies of a job's state in each host's memory, and what it writes to disk."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from torchft._lighthouse_http import LIGHTHOUSE_ENV, HttpLighthouse, Unanswered
from torchft.cli.arguments import Parser, ask_of
from torchft.cli.output import duration_text, printable

_ABOUT = """\
Lists the snapshots in the memory of all hosts, as their keepers have told the lighthouse within the last ten
seconds; without a lighthouse, or with --here, those of this host, of all jobs. Then, for each folder of
checkpoints, what the hosts write, and why one does not get on.
"""
_HEAD = ("host", "job", "group", "rank", "step", "size", "age", "state")
_DISKS = ("host", "job", "folder", "step", "state")
_RIGHT = ("rank", "step", "size", "age")


def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="torchft snapshots", description=_ABOUT)
    ask_of(parser)
    parser.add_argument("--here", action="store_true", help="read this host's memory; ask no lighthouse")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    args = parser.parse_args(arguments)
    try:
        held = _held(args.lighthouse, args.job, args.here)
    except (Unanswered, OSError, RuntimeError, ValueError) as e:
        print(printable(f"torchft snapshots: {e}"), file=sys.stderr)
        return 1
    now = time.time()
    print(json.dumps(held) if args.json else table(held, now) + disks(held, now))
    return 0


def _held(lighthouse: str | None, job: str | None, here: bool) -> list[dict[str, Any]]:
    """Returns an entry for each host: ``host``, ``snapshots``, and ``disks`` if it writes checkpoints."""
    if not here:
        try:
            keepers: list[dict[str, Any]] = HttpLighthouse(lighthouse, job).get("/api/v1/keepers")["keepers"]
            return keepers
        except Unanswered:
            if lighthouse or os.environ.get(LIGHTHOUSE_ENV):
                raise
            print("no lighthouse answers on this machine; in the memory of this host:", file=sys.stderr)
    from torchft import _keeper
    from torchft._torchft import held_in

    held = {
        kind: [one for one in found if job in (None, one["job"])]
        for kind, found in held_in(str(_keeper.root())).items()
    }
    return [{"host": socket.gethostname(), **held}]


def table(held: Sequence[dict[str, Any]], now: float) -> str:
    """Formats what hosts hold. ``now`` is in seconds since 1970."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for one in held:
        for slot in one["snapshots"] or []:
            why = slot.get("incomplete", "")
            step, age = ("-", "-") if why else (str(slot["step"]), duration_text(now - slot["saved"]))
            about = (one["host"], slot["job"], slot["group"], str(slot["group_rank"]), step)
            row = (*about, size(slot["bytes"]), age, why or _what(slot))
            rows.append(tuple(printable(cell) for cell in row))
    if len(rows) == 1:
        hosts = ", ".join(printable(one["host"]) for one in held)
        return f"no snapshots (keepers: {hosts})" if hosts else "no keeper holds snapshots of this job"
    return _aligned(rows)


def _what(slot: dict[str, Any]) -> str:
    _, parts, has = slot.get("share") or (0, 1, 1)
    text = f"{has} of {parts} parts" if has < parts else "complete"
    return f"{text}, on disk" if slot.get("stored") else text


def disks(held: Sequence[dict[str, Any]], now: float) -> str:
    """Formats what hosts write to disk, as lines to append; "": none writes. ``now`` as in `table`."""
    rows: list[tuple[str, ...]] = [_DISKS]
    for one in held:
        for disk in one.get("disks") or []:
            since = duration_text(now - disk["since"])
            state = "complete" if disk["written"] >= 0 else "none"
            if problem := disk.get("problem"):
                state = f"for {since}: {problem}"
            elif (step := disk.get("writing")) is not None:
                state = f"writes step {step}: {size(disk['bytes'])} in {since}"
            step = str(disk["written"]) if disk["written"] >= 0 else "-"
            rows.append(tuple(map(printable, (one["host"], disk["job"], disk["folder"], step, state))))
    return "\n\n" + _aligned(rows) if len(rows) > 1 else ""


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """The rows of a table, of which the first names the columns."""
    head = rows[0]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for name, cell, width in zip(head, row, widths)
        ).rstrip()
        for row in rows
    )


def size(nbytes: int) -> str:
    """A size in bytes, as on the lighthouse's page."""
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 1e8 else f"{nbytes / 1e9:.1f} GB"
