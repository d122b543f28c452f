"""The time from a failure to the survivors' next commit: one group gets SIGKILL (it ends) or SIGSTOP (it
stalls).

Steps of 50 ms on plain and on isolated Gloo, with two groups and with four, and the lighthouse's own defaults
for heartbeats (5 s); its join timeout is 10 s. "Replay" is plain Gloo with `replay_failed_step`, which
upstream lacks. The time is from the signal to the end of the first step that a survivor commits without the
victim; the slowest survivor counts. All processes of a round are new.
"""

from __future__ import annotations

import os
import signal
import time
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

GOAL_KILL = 0.1
GOAL_STOP_S = 5.5
GOAL_LOST, GOAL_LOST_REPLAY = 1, 0
COMPUTE_MS = 50
TRAIN_S = 2.0
CASES = {
    "kill": [(2, "plain"), (4, "plain"), (2, "isolated"), (4, "isolated"), (4, "replay")],
    "stop": [(2, "plain")],
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
# With upstream, a stopped peer delays the others until the collective's timeout: 30 s here.
NOTICED_WITHIN_S = 90


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return, per fault and number of groups, the seconds of each side and the steps that the survivors
    lost.
    """
    result: dict[str, Any] = {}
    for fault in SIGNALS:
        for groups, kind in CASES[fault]:
            rows: dict[str, list[dict[str, float]]] = {ours.name: [], upstream.name: []}
            for number in range(rounds):
                for side in rotated((ours, upstream), number):
                    rows[side.name].append(fail_once(side, fault, groups, kind))
                progress(
                    f"recovery, {fault}, {groups} groups, {kind}, round {number + 1}/{rounds}: "
                    + ", ".join(f"{name} {mine[-1]['seconds']:.2f} s" for name, mine in rows.items())
                )
            ratios = [a["seconds"] / b["seconds"] for a, b in zip(rows[ours.name], rows[upstream.name])]
            result[f"{fault}, {groups} groups, {kind}"] = {
                "sides": {
                    name: {key: vars(Spread.of(row[key] for row in mine)) for key in mine[0]}
                    for name, mine in rows.items()
                },
                "ratio": vars(Spread.of(ratios)),
            }
    return result


def fail_once(side: Side, fault: str, groups: int, kind: str) -> dict[str, float]:
    """Return the seconds of the slowest survivor and the steps that it lost.

    Args:
        side: the package.
        fault: of SIGNALS.
        groups: how many, of one rank each.
        kind: "plain" or "replay" with Gloo, or a process group of `Worker.do_manager`.
    """
    with Job() as job:
        _, address = job.lighthouse(
            side.path, min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
        )
        env = {"TORCHFT_REPLAY_FAILED_STEP": "1"} if kind == "replay" else {}
        everybody = start_groups(job, side, groups, 1, env)
        everybody.do(START_TIMEOUT_S, do="state", mb=1)
        kind = "gloo" if kind in ("plain", "replay") else kind
        everybody.do(START_TIMEOUT_S, do="manager", lighthouse=address, kind=kind)
        for child in everybody.children:
            child.send(do="survive", compute_ms=COMPUTE_MS)
        wait_for_commits(job, everybody.children, groups)
        time.sleep(TRAIN_S)

        *survivors, victim = everybody.children
        struck = time.monotonic()
        if fault == "kill":
            victim.kill()
        else:
            os.kill(victim.pid, signal.SIGSTOP)
        try:
            wait_for_commits(job, survivors, groups - 1)
        finally:
            if fault == "stop":
                os.kill(victim.pid, signal.SIGCONT)
        for child in survivors:
            child.send(do="stop")
        job.wait(
            lambda: all(child.of("survive") for child in survivors), NOTICED_WITHIN_S, "the survivors stop"
        )
        seconds, lost = [], []
        for child in survivors:
            steps = child.of("survive")[-1]["steps"]
            alone = [
                end
                for _, end, ok, participants in steps
                if end > struck and ok and participants == groups - 1
            ]
            seconds.append(alone[0] - struck)
            lost.append(sum(not ok for begin, _, ok, _ in steps if struck - 10 < begin < alone[0]))
        return {"seconds": max(seconds), "lost": max(lost)}


def wait_for_commits(job: Job, children: list[Any], participants: int) -> None:
    job.wait(
        lambda: all(
            any(e["participants"] == participants for e in child.of("committed")) for child in children
        ),
        NOTICED_WITHIN_S,
        f"a commit of {participants} groups",
    )


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for case, figures in result.items():
        ratio = Spread(**figures["ratio"])
        seconds, lost = (
            [Spread(**figures["sides"][name][what]) for name in (ours, upstream)]
            for what in ("seconds", "lost")
        )
        met = ratio.median <= GOAL_KILL if case.startswith("kill") else seconds[0].median <= GOAL_STOP_S
        most = GOAL_LOST_REPLAY if case.endswith("replay") else GOAL_LOST
        rows.append(
            [
                case,
                seconds[0].text(),
                seconds[1].middle(),
                f"{ratio.text(3)} {verdict(met)}",
                f"{lost[0].median:g} {verdict(lost[0].p90 <= most)}",
                f"{lost[1].median:g}",
            ]
        )
    ratio_head = f"ratio (goal <= {GOAL_KILL:g}; stop: {GOAL_STOP_S:g} s)"
    lost_head = f"steps lost (goal <= {GOAL_LOST}; replay: {GOAL_LOST_REPLAY}): {ours}"
    return markdown_table(["fault", f"{ours}, s", f"{upstream}, s", ratio_head, lost_head, upstream], rows)
