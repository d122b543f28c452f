"""The time of read-only commands, from the start of their process to its end.

The table shows the slowest of ours, and the command that both packages have; benchmarks.json has the others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Progress, Side, Spread, markdown_table, rotated, verdict
from processes import Job, clean_environment

GOAL_S = 0.3
TIMEOUT_S = 60
CONSOLE_SCRIPT = Path(__file__).resolve().parent / "torchft_lighthouse.py"
TORCHFT = [sys.executable, "-m", "torchft.cli"]
# {lighthouse} is the address of a running lighthouse without groups.
OURS_ALONE = {
    "torchft --help": [*TORCHFT, "--help"],
    "torchft status": [*TORCHFT, "status", "--lighthouse", "{lighthouse}"],
    "torchft events": [*TORCHFT, "events", "--lighthouse", "{lighthouse}"],
    "torchft run --help": [*TORCHFT, "run", "--help"],
    "torchft doctor --quick": [*TORCHFT, "doctor", "--quick", "--lighthouse", "{lighthouse}"],
}
BOTH = {"torchft_lighthouse --help": [sys.executable, str(CONSOLE_SCRIPT), "--help"]}


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the seconds of each command on both sides. Upstream has only one of the commands."""
    todo = [(ours, name, argv) for name, argv in {**OURS_ALONE, **BOTH}.items()]
    todo += [(upstream, name, argv) for name, argv in BOTH.items()]
    seconds: dict[str, dict[str, list[float]]] = {side.name: {} for side in (ours, upstream)}
    with Job() as job:
        _, lighthouse = job.lighthouse(ours.path, min_replicas=1)
        # The first run is not counted: it brings the files into the page cache.
        for number in range(-1, rounds):
            for side, name, argv in rotated(todo, number):
                took = _run(side, [word.format(lighthouse=lighthouse) for word in argv])
                if number >= 0:
                    seconds[side.name].setdefault(name, []).append(took)
            progress(f"commands, round {number + 1}/{rounds}")
    return {
        "rounds": rounds,
        "seconds": {
            side: {name: vars(Spread.of(values)) for name, values in of_side.items()}
            for side, of_side in seconds.items()
        },
    }


def _run(side: Side, argv: list[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(
        argv, env=clean_environment(side.path), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    took = time.perf_counter() - began
    # The doctor exits with 1 if it finds a problem on this machine; its duration is the same.
    if done.returncode != 0 and "doctor" not in argv:
        raise RuntimeError(f"{side.name}: {' '.join(argv)} ended with {done.returncode}: {done.stderr}")
    return took


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    measured = result["seconds"]
    slowest = max(measured[ours], key=lambda name: measured[ours][name]["median"])
    rows = []
    for side in (ours, upstream):
        for name, spread in measured[side].items():
            if name != slowest and name not in measured[upstream]:
                continue
            took = Spread(**spread)
            cell = f"{took.text()} {verdict(took.median < GOAL_S)}" if side == ours else took.text()
            rows.append([name if side == ours else f"{name}, {upstream}", cell])
    return markdown_table(["command", f"s (goal < {GOAL_S})"], rows)
