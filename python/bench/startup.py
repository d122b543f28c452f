"""The time from the start of `torchft_lighthouse` until it accepts connections, and its resident memory
then.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import Progress, Side, Spread, markdown_table, rotated, verdict
from processes import Job, JobFailed, free_port

GOAL_S = 0.3
GOAL_MB = 64.0
START_TIMEOUT_S = 60
CONSOLE_SCRIPT = Path(__file__).resolve().parent / "torchft_lighthouse.py"


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return the seconds until the lighthouse listens and its resident memory in MB (1e6 bytes), for both
    packages.
    """
    seconds: dict[str, list[float]] = {ours.name: [], upstream.name: []}
    memory: dict[str, list[float]] = {ours.name: [], upstream.name: []}
    for side in (ours, upstream):
        _start(side)  # the first run is not counted: it brings the files into the page cache
    for number in range(rounds):
        for side in rotated((ours, upstream), number):
            took, resident = _start(side)
            seconds[side.name].append(took)
            memory[side.name].append(resident)
        progress(
            f"start of the lighthouse, round {number + 1}/{rounds}: "
            + ", ".join(
                f"{name} {values[-1]:.2f} s {memory[name][-1]:.0f} MB" for name, values in seconds.items()
            )
        )
    return {
        "rounds": rounds,
        "seconds": {name: vars(Spread.of(values)) for name, values in seconds.items()},
        "mb": {name: vars(Spread.of(values)) for name, values in memory.items()},
    }


def _start(side: Side) -> tuple[float, float]:
    port = free_port()
    argv = [sys.executable, CONSOLE_SCRIPT, "--min_replicas", "1", "--bind", f"0.0.0.0:{port}"]
    with Job() as job:
        began = time.perf_counter()
        child = job.start(f"lighthouse-{side.name}", argv, path=side.path)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                took = time.perf_counter() - began
                if child.returncode is not None or took > START_TIMEOUT_S:
                    raise JobFailed(
                        f"the lighthouse did not listen within {took:.1f} s\n{job.report()}"
                    ) from None
                time.sleep(0.002)
        took = time.perf_counter() - began
        return took, _resident_mb(child.pid)


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text())
        assert found is not None
        return int(found[1]) * 1024 / 1e6
    out = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, timeout=10)
    return int(out.stdout) * 1024 / 1e6


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for name in (ours, upstream):
        seconds, memory = Spread(**result["seconds"][name]), Spread(**result["mb"][name])
        goals = ("", "")
        if name == ours:
            goals = (
                f" {verdict(seconds.median < GOAL_S)}",
                f" {verdict(memory.median < GOAL_MB)}",
            )
        rows.append([name, seconds.text() + goals[0], memory.text(0) + goals[1]])
    return markdown_table(
        ["package", f"start to listening, s (goal < {GOAL_S})", f"resident memory, MB (goal < {GOAL_MB:g})"],
        rows,
    )
