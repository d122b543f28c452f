"""The cost of a step when nothing fails: start_quorum + allreduce of 10,000 floats + should_commit, no
compute.

Two replica groups as processes, Gloo, with one and with four ranks per group. PyTorch's Gloo allreduce alone
runs in the same processes, between the same ranks. The jobs of both packages run at the same time and take
turns, so that other load on the machine affects both.
"""

from __future__ import annotations

from typing import Any

from common import (
    START_TIMEOUT_S,
    Progress,
    Side,
    Spread,
    Workers,
    markdown_table,
    rotated,
    start_groups,
    verdict,
)
from processes import Job

# Of the step with one rank a group, and of a rank's processor time with four, which share the cores.
GOAL, GOAL_GLOO, GOAL_CPU = 0.35, 1.4, 0.45
PARTS = ("start_quorum", "allreduce", "should_commit")
COMMAND_TIMEOUT_S = 120


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress, steps: int = 200) -> dict[str, Any]:
    """Return, for each number of ranks per group, the times of both sides in milliseconds and our ratios."""
    return {str(ranks): _measure(ours, upstream, ranks, rounds, steps, progress) for ranks in (1, 4)}


def _measure(
    ours: Side, upstream: Side, ranks: int, rounds: int, steps: int, progress: Progress
) -> dict[str, Any]:
    # With four ranks per group, eight processes share the machine, and steps are slow; fewer of them suffice.
    steps = max(20, steps // ranks)
    with Job() as job:
        progress(f"step, {ranks} rank(s) a group: starting {4 * ranks} processes")
        jobs: dict[str, Workers] = {}
        for side in (ours, upstream):
            _, address = job.lighthouse(
                side.path, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000
            )
            jobs[side.name] = workers = start_groups(job, side, 2, ranks)
            workers.do(START_TIMEOUT_S, do="peers")
            workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
            workers.do(COMMAND_TIMEOUT_S, do="steps", count=20)
            workers.do(COMMAND_TIMEOUT_S, do="plain_steps", count=20)

        samples: dict[str, dict[str, list[float]]] = {name: {} for name in jobs}
        for number in range(rounds):
            for side in rotated((ours, upstream), number):
                workers = jobs[side.name]
                answers = workers.do(COMMAND_TIMEOUT_S, do="steps", count=steps)
                failed = sum(answer["failed"] for answer in answers)
                if failed or any(answer["participants"] != 2 for answer in answers):
                    raise RuntimeError(
                        f"{side.name}: {failed} of {steps} steps were not committed by both groups"
                    )
                plain = workers.do(COMMAND_TIMEOUT_S, do="plain_steps", count=steps)
                mine = samples[side.name]
                for part in ("step", *PARTS):
                    mine.setdefault(part, []).append(Spread.of(t for a in answers for t in a[part]).median)
                mine.setdefault("cpu", []).append(sum(answer["cpu"] for answer in answers) / len(answers))
                mine.setdefault("plain", []).append(Spread.of(t for a in plain for t in a["step"]).median)
                mine.setdefault("plain_cpu", []).append(sum(answer["cpu"] for answer in plain) / len(plain))
            progress(
                f"step, {ranks} rank(s) a group, round {number + 1}/{rounds}: "
                + ", ".join(f"{name} {samples[name]['step'][-1]:.2f} ms" for name in jobs)
            )
    mine, theirs = samples[ours.name], samples[upstream.name]
    ratios = {
        "ratio": (mine["step"], theirs["step"]),
        "ratio_cpu": (mine["cpu"], theirs["cpu"]),
        "ratio_plain": (mine["step"], mine["plain"]),
    }
    return {
        "rounds": rounds,
        "steps_a_round": steps,
        "ms": {
            name: {part: vars(Spread.of(values)) for part, values in parts.items()}
            for name, parts in samples.items()
        },
        **{name: vars(Spread.of(a / b for a, b in zip(*pair))) for name, pair in ratios.items()},
    }


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for ranks, figures in result.items():
        step, cpu, plain = (Spread(**figures[name]) for name in ("ratio", "ratio_cpu", "ratio_plain"))
        for name in (ours, upstream):
            ms = {part: Spread(**spread) for part, spread in figures["ms"][name].items()}
            mine, alone = name == ours, ranks == "1"
            rows.append(
                [
                    ranks,
                    name,
                    ms["step"].text(),
                    step.text() + (f" {verdict(step.median <= GOAL)}" if alone else "") if mine else "",
                    plain.text() + (f" {verdict(plain.median <= GOAL_GLOO)}" if alone else "")
                    if mine
                    else "",
                    ms["cpu"].text(),
                    cpu.text() + ("" if alone else f" {verdict(cpu.median <= GOAL_CPU)}") if mine else "",
                ]
            )
            if mine:
                rows.append(
                    [ranks, "Gloo's allreduce alone", ms["plain"].text(), "", "", ms["plain_cpu"].text(), ""]
                )
    head = [
        "ranks a group",
        "loop",
        "step, ms",
        f"of upstream's (goal <= {GOAL})",
        f"of Gloo's alone (goal <= {GOAL_GLOO})",
        "CPU of a rank, ms",
        f"of upstream's (goal <= {GOAL_CPU})",
    ]
    return markdown_table(head, rows)
