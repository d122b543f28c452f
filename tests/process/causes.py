"""Checks how a lighthouse detected failures: a SIGKILL must be noticed by broken connections, not by
silence.
"""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from pathlib import Path

# Heartbeat timeout of lighthouses whose groups are only killed. Longer than any test, so that no failure is
# detected by silence.
SILENCE_MS = 600_000
# All causes, read from the lighthouse's source.
_SOURCE = Path(__file__).resolve().parents[2] / "go/quorum/types.go"
CAUSES = re.findall(r'^\t\w+ +Cause = "(\w+)"', _SOURCE.read_text(), re.MULTILINE)
_COUNTED = re.compile(
    r'^torchft_member_failures_total\{cause="(\w+)",training_job="default"\} (\d+)$', re.MULTILINE
)
# The causes of a kill. The kernel closes the sockets of a killed process: its stream to the lighthouse
# ("connection") or to the manager server of its group ("rank"). "unreachable" may also follow a stop: most
# peers reported broken connections to the member, and then either its port refused a connection, or its
# stream was open and brought no answer. A kill leaves no stream open, so without stopped processes it is the
# former.
_BY_CONNECTION = ("connection", "rank", "unreachable")
# A manager server ends the connection of a silent rank ("rank").
_BY_SILENCE = ("silent", "unreachable", "stalled", "rank")


def failures(lighthouse: str) -> Counter[str]:
    """Returns the number of failed members by cause, counted by one of our lighthouses since its start."""
    with urllib.request.urlopen(f"http://{lighthouse.removeprefix('http://')}/metrics", timeout=20) as answer:
        counted = _COUNTED.findall(answer.read().decode())
    assert counted, "the metrics have no failures by cause"
    return Counter({cause: int(count) for cause, count in counted})


def check_killed(before: Counter[str], after: Counter[str], members: int, heartbeat_timeout_ms: int) -> None:
    """Checks that this number of members were killed between two counts, and that each was detected by a
    connection.

    If the heartbeat timeout is short, because the job has stopped members too, a healthy member may be silent
    for that long on a busy machine. Silence is then ignored, and only the connections are counted.
    """
    new = {cause: after[cause] - before[cause] for cause in after}
    found = sum(new[cause] for cause in _BY_CONNECTION)
    assert found >= members, f"{members} members were killed, and {found} found by a connection: {new}"
    others = {cause: count for cause, count in new.items() if count and cause not in _BY_CONNECTION}
    if heartbeat_timeout_ms < SILENCE_MS:
        others.pop("silent", None)
    assert not others, f"a kill is no reason for these causes: {new}"


def check_killed_by_log(log: str, member: str) -> None:
    """The same check for one member, with the log of a lighthouse that has ended."""
    reasons = re.findall(rf'torchft: a member failed" .*member="?\[{member}\b.*reason="([^"]*)"', log)
    assert reasons, f"{member} was killed, and is in no line of the log:\n{log}"
    assert not any(reason.startswith("no sign of life") for reason in reasons), reasons


def check_silenced(before: Counter[str], after: Counter[str], members: int) -> None:
    """Checks that this number of members were stopped or cut off between two counts, while their
    connections stayed open.
    """
    new = {cause: after[cause] - before[cause] for cause in after}
    assert sum(new[cause] for cause in _BY_SILENCE) >= members, (
        f"{members} members were stopped or cut off: {new}"
    )
