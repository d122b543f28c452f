"""How a lighthouse found out that members had failed: a SIGKILL by connections that break, and never by silence."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from pathlib import Path

# Heartbeat timeout of lighthouses under which groups are only killed: longer than any test, so that silence explains
# nothing that happens in it.
SILENCE_MS = 600_000
# All there are, from the lighthouse's source.
_SOURCE = Path(__file__).resolve().parents[2] / "go/quorum/types.go"
CAUSES = re.findall(r'^\t\w+ +Cause = "(\w+)"', _SOURCE.read_text(), re.MULTILINE)
_COUNTED = re.compile(r'^torchft_member_failures_total\{cause="(\w+)",training_job="default"\} (\d+)$', re.MULTILINE)
# The kernel closes what a killed process had open: its stream to the lighthouse ("connection") or to the manager server
# of its group ("rank"), and its host may say that it has ended ("process"). "unreachable" belongs to both sides: the
# peers' connections to it broke, most of them said so, and then either its port refused a connection, or its stream was
# open and brought no answer. A kill leaves no stream open, so in jobs in which nobody is stopped it is the former.
_BY_CONNECTION = ("connection", "rank", "process", "unreachable")
_BY_SILENCE = ("silent", "unreachable", "stalled")


def failures(lighthouse: str) -> Counter[str]:
    """The failed members that a lighthouse of ours has counted since its start, by cause."""
    with urllib.request.urlopen(f"http://{lighthouse.removeprefix('http://')}/metrics", timeout=20) as answer:
        counted = _COUNTED.findall(answer.read().decode())
    assert counted, "the metrics have no failures by cause"
    return Counter({cause: int(count) for cause, count in counted})


def check_killed(before: Counter[str], after: Counter[str], members: int, heartbeat_timeout_ms: int) -> None:
    """So many members were killed between two countings, and each was found by a connection.

    Where the heartbeat timeout is short, for members that are stopped in the same job, one that lives may be silent for
    as long on a busy machine: it is nobody's cause for a kill, and only the connections are counted.
    """
    new = {cause: after[cause] - before[cause] for cause in after}
    found = sum(new[cause] for cause in _BY_CONNECTION)
    assert found >= members, f"{members} members were killed, and {found} found by a connection: {new}"
    others = {cause: count for cause, count in new.items() if count and cause not in _BY_CONNECTION}
    if heartbeat_timeout_ms < SILENCE_MS:
        others.pop("silent", None)
    assert not others, f"members were found by what a kill is no reason for: {new}"


def check_killed_by_log(log: str, member: str) -> None:
    """The same for one member, by the log of a lighthouse that has ended."""
    reasons = re.findall(rf'torchft: a member failed" .*member="?\[{member}\b.*reason="([^"]*)"', log)
    assert reasons, f"{member} was killed, and is in no line of the log:\n{log}"
    assert not any(reason.startswith("no sign of life") for reason in reasons), reasons


def check_silenced(before: Counter[str], after: Counter[str], members: int) -> None:
    """So many members have stopped, or have lost their network, between two countings: their connections are there."""
    new = {cause: after[cause] - before[cause] for cause in after}
    assert sum(new[cause] for cause in _BY_SILENCE) >= members, f"{members} members stood still: {new}"
