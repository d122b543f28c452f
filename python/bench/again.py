"""The cost of a failure in a step with an ElasticDataLoader: one of four groups is killed (SIGKILL)
in a unit, while it reduces, or after its vote.

Four replica groups as processes, Gloo, one rank each. A step has 12 units, so each group computes 3, and each
survivor 1 more if it keeps its gradients (`replay_failed_step`), else 4. A unit waits, as for a GPU, so that
the processors of the machine do not count. The failed step is compared with the median of the others; the
slowest survivor counts. All processes of a round are new.
"""

from __future__ import annotations

import statistics
from typing import Any

from common import (
    START_TIMEOUT_S,
    Progress,
    Side,
    Spread,
    markdown_table,
    rotated,
    start_groups,
    verdict,
)
from processes import Job

GROUPS, UNITS, UNIT_MS = 4, 12, 200
STEPS, FAIL_AT = 8, 5
OWN = UNITS // GROUPS
# DDP: the units of the failed group, divided among the survivors, and a tenth of a step for everything else.
GOALS = {False: 1 + 1.3 / (GROUPS - 1), True: 2.1}
COMMAND_TIMEOUT_S = 120
# Whether the model is sharded, gradients are kept, and when the group is killed. After its vote the step
# counts, and the next one is made without it.
PHASES = ("unit before", "last unit", "reduction", "vote")
CASES = {
    "DDP, without replay": (False, False, "last unit"),
    **{f"DDP, {phase}": (False, True, phase) for phase in PHASES},
    **{f"FSDP2, {phase}": (True, True, phase) for phase in PHASES},
}


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the times of a step, and of the failed one, in milliseconds. Upstream has no such loader."""
    samples: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for number in range(rounds):
        for case in rotated(list(CASES), number):
            samples[case].append(fail_once(ours, *CASES[case]))
        progress(
            f"again, round {number + 1}/{rounds}: "
            + ", ".join(f"{case} {mine[-1]['ratio']:.2f}" for case, mine in samples.items())
        )
    return {
        case: {key: vars(Spread.of(sample[key] for sample in mine)) for key in mine[0]}
        for case, mine in samples.items()
    }


def fail_once(side: Side, sharded: bool, replays: bool, phase: str) -> dict[str, float]:
    """Return the figures of the slowest survivor."""
    with Job() as job:
        _, address = job.lighthouse(
            side.path, min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
        )
        workers = start_groups(job, side, GROUPS, 1, {"TORCHFT_REPLAY_FAILED_STEP": str(int(replays))})
        workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        victim, *survivors = workers.children
        victim.expected_to_live = False
        command = {"do": "units", "sharded": sharded, "steps": STEPS, "units": UNITS, "unit_ms": UNIT_MS}
        command["phase"] = phase
        for child in workers.children:
            child.send(**command, fail_at=FAIL_AT if child is victim else -1)
        job.wait(
            lambda: all(child.of("units") for child in survivors), COMMAND_TIMEOUT_S, "the survivors train"
        )
        answers = [child.of("units")[-1] for child in survivors]
    expected = units(replays, phase)
    if any(answer["units"][FAIL_AT] != expected for answer in answers):
        raise RuntimeError(f"units: {[answer['units'] for answer in answers]}, expected {expected}")
    # the first step connects, and the steps after the failure have more units
    usual = [statistics.median(answer["step"][1:FAIL_AT]) for answer in answers]
    at = FAIL_AT + 1 if phase == "vote" else FAIL_AT
    failed = [answer["step"][at] for answer in answers]
    return {
        "step": statistics.median(usual),
        "failed": max(failed),
        "ratio": max(late / median for late, median in zip(failed, usual)),
    }


def units(replays: bool, phase: str) -> list[int]:
    """The units that a survivor computes in each try of the step in which a group is killed."""
    if phase == "vote":
        return [OWN]
    return [OWN, OWN // (GROUPS - 1) if replays else UNITS // (GROUPS - 1)]


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for case, (sharded, replays, phase) in CASES.items():
        spreads = {name: Spread(**figures) for name, figures in result[case].items()}
        ratio = spreads["ratio"]
        rows.append(
            [
                case,
                " + ".join(map(str, units(replays, phase))),
                spreads["step"].middle(0),
                spreads["failed"].middle(0),
                f"{ratio.text()} {verdict(ratio.median <= GOALS[sharded]) if replays else ''}".strip(),
            ]
        )
    head = [
        "model, and the phase of the kill",
        "units",
        "a step, ms",
        "the failed step, after a vote the next one, ms",
        f"ratio (goal <= {GOALS[False]:.2f}, FSDP2 {GOALS[True]})",
    ]
    return markdown_table(head, rows)
