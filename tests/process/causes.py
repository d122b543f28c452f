"""How a lighthouse found out that members had failed: a SIGKILL by connections that break, and never by silence."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter

# Heartbeat timeout of lighthouses under which groups are only killed: longer than any test, so that silence explains
# nothing that happens in it.
SILENCE_MS = 600_000
_COUNTED = re.compile(r'^torchft_member_failures_total\{cause="(\w+)",training_job="default"\} (\d+)$', re.MULTILINE)
_BY_SILENCE = ("silent", "unreachable", "stalled")


def failures(lighthouse: str) -> Counter[str]:
    """The failed members that a lighthouse of ours has counted since its start, by cause."""
    with urllib.request.urlopen(f"http://{lighthouse.removeprefix('http://')}/metrics", timeout=20) as answer:
        counted = _COUNTED.findall(answer.read().decode())
    assert counted, "the metrics have no failures by cause"
    return Counter({cause: int(count) for cause, count in counted})


def check_killed(before: Counter[str], after: Counter[str], members: int) -> None:
    """So many members were killed between two countings, and were found before they had been silent for long."""
    new = {cause: after[cause] - before[cause] for cause in after}
    assert new["silent"] == 0, f"members that were killed were found by their silence: {new}"
    assert sum(new.values()) >= members, f"{members} members were killed: {new}"


def check_silenced(before: Counter[str], after: Counter[str], members: int) -> None:
    """So many members have stopped, or have lost their network, between two countings: their connections are there."""
    new = {cause: after[cause] - before[cause] for cause in after}
    assert sum(new[cause] for cause in _BY_SILENCE) >= members, f"{members} members stood still: {new}"
