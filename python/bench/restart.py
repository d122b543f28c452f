"""The phases of a group's restart, from the start of its process to its first commit.

Two groups of one rank train with steps of 50 ms and 10 MB of state. Once per round, one of them is killed
with SIGKILL and restarted without state. The first two phases, the start of Python and the import of torch,
are the same for any program; the later ones are due to torchft.
"""

from __future__ import annotations

import time
from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, markdown_table, rotated, start_group, start_groups
from processes import Child, Job, free_port

COMPUTE_MS = 50
STATE_MB = 10
# In chronological order. Upstream does not report phases of the recovery: they count as part of its first
# step.
PHASES = (
    "process start",
    "import torch",
    "import torchft",
    "connect",
    "quorum",
    "reconfigure",
    "transfer",
    "load",
    "first step",
)
DUE_TO_TORCHFT = PHASES[2:]


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the milliseconds of each phase on both sides, and the sum of those after the import of torch."""
    samples: dict[str, list[dict[str, float]]] = {ours.name: [], upstream.name: []}
    for number in range(rounds):
        for side in rotated((ours, upstream), number):
            samples[side.name].append(_round(side))
        progress(
            f"restart, round {number + 1}/{rounds}: "
            + ", ".join(
                f"{name} {mine[-1]['torchft']:.0f} of {mine[-1]['all']:.0f} ms"
                for name, mine in samples.items()
            )
        )
    return {
        "rounds": rounds,
        "ms": {
            name: {phase: vars(Spread.of(sample[phase] for sample in mine)) for phase in mine[0]}
            for name, mine in samples.items()
        },
    }


def _round(side: Side) -> dict[str, float]:
    with Job() as job:
        _, address = job.lighthouse(
            side.path, min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
        )
        both = start_groups(job, side, 2, 1)
        both.do(START_TIMEOUT_S, do="state", mb=STATE_MB)
        both.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        survivor, victim = both.children
        for child in both.children:
            child.send(do="survive", compute_ms=COMPUTE_MS)
        _wait_for_commit(job, survivor, 2)
        victim.kill()
        _wait_for_commit(job, survivor, 1)
        # torch has just been imported twice, so its files are in the page cache, as on a host where a process
        # failed
        began = time.monotonic()
        (back,) = start_group(job, side, 1, 1, free_port())
        back.send(do="state", mb=STATE_MB)
        back.send(do="restart", lighthouse=address, compute_ms=COMPUTE_MS)
        job.wait(lambda: back.of("restart"), START_TIMEOUT_S, "the restarted group commits")
        return _phases(began, back.of("restart")[0])


def _wait_for_commit(job: Job, child: Child, participants: int) -> None:
    def committed() -> bool:
        commits = child.of("committed")
        return bool(commits) and commits[-1]["participants"] == participants

    job.wait(committed, START_TIMEOUT_S, f"a commit of {participants} groups")


def _phases(began: float, ends: dict[str, Any]) -> dict[str, float]:
    """Turn the end times of phases into durations, without the time to make the benchmark's own state."""
    seconds = {
        "process start": ends["process start"] - began,
        "import torch": ends["import torch"] - ends["process start"],
        "import torchft": ends["import torchft"] - ends["began"],
        "connect": ends["connect"] - ends["import torchft"],
        **dict.fromkeys(("quorum", "reconfigure", "transfer", "load"), 0.0),
        **ends["recovery"],
    }
    seconds["first step"] = ends["committed"] - ends["connect"] - sum(ends["recovery"].values())
    ms = {phase: 1000 * seconds[phase] for phase in PHASES}
    return {**ms, "torchft": sum(ms[phase] for phase in DUE_TO_TORCHFT), "all": sum(ms.values())}


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    spreads = {
        name: {phase: Spread(**spread) for phase, spread in result["ms"][name].items()}
        for name in (ours, upstream)
    }
    rows = []
    for phase in DUE_TO_TORCHFT:
        medians = [spread[phase].median for spread in spreads.values()]
        rows.append([phase, *(f"{median:.0f}" if median else "-" for median in medians)])
    rows.append(["after torch is imported", *(spread["torchft"].text(0) for spread in spreads.values())])
    rows.append(["all", *(spread["all"].text(0) for spread in spreads.values())])
    return markdown_table(["phase", f"{ours}, ms", f"{upstream}, ms"], rows)
