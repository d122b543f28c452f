"""The throughput of four groups, one of which is killed every 10 s and restarted at once, and a picture over
time.

Steps of 100 ms on plain Gloo, with the lighthouse's defaults except for the join timeout. The throughput is
the number of committed batches (steps times the groups that take part in them), as a share of that of four
groups without faults. A commit is behind history if its step began after another group had committed a later
step.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from common import (
    REPOSITORY,
    START_TIMEOUT_S,
    Progress,
    Side,
    Spread,
    markdown_table,
    start_group,
    start_groups,
    verdict,
)
from processes import Child, Job, free_port

GOAL = 0.83
GROUPS = 4
COMPUTE_MS = 100
CALM_S, CHURN_S, EVERY_S = 10.0, 60.0, 10.0
# 0.1 s is the default of LighthouseServer, and 60 s that of the command, in both packages.
JOIN_TIMEOUTS_MS = (100, 2000, 10_000, 60_000)
PICTURE = REPOSITORY / "docs" / "internals" / "recovery.png"


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return, per join timeout and side, the remaining share of the throughput, and the batches in each
    second.
    """
    result: dict[str, Any] = {}
    for join_timeout_ms in JOIN_TIMEOUTS_MS:
        for side in (ours, upstream):
            runs = [_run(side, join_timeout_ms) for _ in range(rounds)]
            runs.sort(key=lambda run: run["share"])
            share = Spread.of(run["share"] for run in runs)
            # The batches over time are from the median run.
            figures = {
                **runs[len(runs) // 2],
                "share": vars(share),
                "behind": sum(run["behind"] for run in runs),
            }
            result.setdefault(f"{join_timeout_ms / 1000:g}", {})[side.name] = figures
            progress(f"churn, join timeout {join_timeout_ms} ms, {side.name}: {share.text()} kept")
    _draw(result, PICTURE)
    return result


def _run(side: Side, join_timeout_ms: int) -> dict[str, Any]:
    with Job() as job:
        _, address = job.lighthouse(
            side.path, min_replicas=1, join_timeout_ms=join_timeout_ms, heartbeat_timeout_ms=5000
        )
        everybody = start_groups(job, side, GROUPS, 1)
        everybody.do(START_TIMEOUT_S, do="state", mb=1)
        everybody.do(START_TIMEOUT_S, do="manager", lighthouse=address)
        for child in everybody.children:
            child.send(do="survive", compute_ms=COMPUTE_MS)
        job.wait(
            lambda: all(
                any(e["participants"] == GROUPS for e in c.of("committed")) for c in everybody.children
            ),
            START_TIMEOUT_S,
            "all groups train",
        )
        groups: list[Child] = list(everybody.children)
        calm = time.monotonic()
        time.sleep(CALM_S)
        churn = time.monotonic()
        for number in range(int(CHURN_S / EVERY_S)):
            victim = 1 + number % (GROUPS - 1)  # the first group is never killed, because it reports
            groups[victim].kill()
            (child,) = start_group(job, side, victim, 1, free_port())
            for command in (
                {"do": "state", "mb": 1},
                {"do": "manager", "lighthouse": address},
                {"do": "survive", "compute_ms": COMPUTE_MS},
            ):
                child.send(**command)
            groups[victim] = child
            time.sleep(max(0.0, churn + (number + 1) * EVERY_S - time.monotonic()))
        end = time.monotonic()
        for child in groups:
            child.send(do="stop")
        answered = time.monotonic() + 90
        while time.monotonic() < answered and not all(child.of("survive") for child in groups):
            time.sleep(0.2)
        runs = [child.of("survive")[-1] for child in groups if child.of("survive")]
        commits = [
            (step, number)
            for run in runs
            for step, number in zip(run["steps"], run["numbers"], strict=True)
            if step[2]
        ]
        first = runs[0] if groups[0].of("survive") else {"steps": []}
        batches = [(e, participants) for _, e, ok, participants in first["steps"] if ok]
        before = sum(n for e, n in batches if calm <= e < churn) / (churn - calm)
        kept = sum(n for e, n in batches if churn <= e < end) / (end - churn)
        seconds = [sum(n for e, n in batches if s <= e - calm < s + 1) for s in range(int(end - calm))]
        behind = sum(any(n2 > n and s2[1] < s[0] for s2, n2 in commits) for s, n in commits)
        return {"share": kept / before if before else 0.0, "per_second": seconds, "behind": behind}


def _draw(result: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        return  # without matplotlib, the figures are still in the table
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(result), 1, figsize=(9, 2 * len(result)), sharex=True)
    for ax, (seconds, sides) in zip(
        axes, sorted(result.items(), key=lambda item: float(item[0])), strict=True
    ):
        for name, run in sides.items():
            ax.plot(
                range(len(run["per_second"])),
                run["per_second"],
                label=f"{name}: {Spread(**run['share']).text()} kept",
            )
        for kill in range(int(CHURN_S / EVERY_S)):
            ax.axvline(CALM_S + kill * EVERY_S, color="0.8", linewidth=1)
        ax.set_ylabel("batches/s")
        ax.set_title(f"join timeout {seconds} s", fontsize=9)
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=8)
    axes[-1].set_xlabel("seconds; at each line one of four groups is killed and started again")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for seconds, sides in sorted(result.items(), key=lambda item: float(item[0])):
        share = {name: Spread(**run["share"]) for name, run in sides.items()}
        cells = [f"{share[ours].text()} {verdict(share[ours].median >= GOAL)}"]
        cells.append(share[upstream].text() if upstream in share else "")
        behind = [str(sides[name]["behind"]) if name in sides else "" for name in (ours, upstream)]
        rows.append([seconds, *cells, *behind])
    kept = f"kept: {ours} (goal >= {GOAL:g})"
    return markdown_table(
        ["join timeout, s", kept, upstream, f"commits behind history: {ours}", upstream], rows
    )
