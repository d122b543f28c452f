"""The slow-down of a source's training while a group heals from it and from another source.

Two sources train: each step computes for 10 ms and then waits for 10 ms, as for a GPU, so that they leave one
of two cores free. A target fetches their state repeatedly, from both. It represents another host, so it only
uses idle processor time: the figures show the cost of serving, without the target's own work. Steps with and
without a target are compared, in turns, for three ways of serving: without limits (the default), with a limit
on each source's bandwidth (for hosts whose network the training needs), and in the background.

    python python/bench/run.py heal_sources
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from heal import TIMEOUT_S, Process, serve_commands

GOAL = 0.05
STATE_BYTES = 200 << 20
COMPUTE_S, WAIT_S = 0.01, 0.01
SECONDS = 3.0
VARIANTS: dict[str, dict[str, Any]] = {
    "at once": {},
    "at 200 MB/s each": {"bandwidth_limit": 200 << 20},
    "in the background": {"background": True},
}


class Worker:
    """A training source, or the target."""

    def __init__(self) -> None:
        import torch

        from torchft.checkpointing import HTTPTransport
        from torchft.checkpointing.client import sources

        torch.set_num_threads(1)
        sources._HELP_AFTER = 0.0
        self.torch = torch
        self.make: Any = HTTPTransport

    def do_usage(self) -> dict[str, Any]:
        return {"rss": 0}

    def do_source(self, kwargs: dict[str, Any], helps: bool) -> dict[str, Any]:
        tensors = STATE_BYTES // (10 << 20)
        state = {f"t{i}": self.torch.full((10 << 20,), 1, dtype=self.torch.uint8) for i in range(tensors)}
        timeout = timedelta(seconds=TIMEOUT_S)
        self.transport = self.make(timeout, 0, **kwargs)
        if helps:
            self.transport.help_checkpoint(1, state)
        else:
            self.transport.send_checkpoint([1], 1, state, timeout)
        return {"metadata": self.transport.metadata()}

    def do_train(self, seconds: float) -> dict[str, Any]:
        matrix = self.torch.randn(192, 192)
        steps = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            for _ in range(self.rounds(matrix)):
                matrix @ matrix
            time.sleep(WAIT_S)
            steps.append(time.perf_counter() - begin)
        return {"median_s": statistics.median(steps)}

    def rounds(self, matrix: Any) -> int:
        """Return how many matrix products take COMPUTE_S on an idle processor; used for the whole run."""
        if not hasattr(self, "_rounds"):
            begin = time.process_time()
            for _ in range(200):
                matrix @ matrix
            self._rounds = max(1, round(200 * COMPUTE_S / (time.process_time() - begin)))
        return self._rounds

    def do_yield(self) -> dict[str, Any]:
        """Let this process, with its present and future threads, use only idle processor time."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
        return {}

    def do_fetch(self, metadata: list[str], seconds: float) -> dict[str, Any]:
        end, received = time.monotonic() + seconds, 0
        timeout = timedelta(seconds=TIMEOUT_S)
        transport = self.make(timeout, 0)
        begin = time.monotonic()
        while time.monotonic() < end:
            transport.recv_checkpoint(0, metadata[0], 1, timeout, additional_sources=[lambda: metadata[1]])
            received += STATE_BYTES
        transport.shutdown()
        return {"gb_per_s": received / 1e9 / (time.monotonic() - begin)}

    def do_end(self) -> dict[str, Any]:
        self.transport.shutdown()
        return {}


def measure(ours: Any, _upstream: Any, rounds: int, progress: Any) -> dict[str, Any]:
    """Return, per variant: the sources' step with and without a target in ms, their slow-down, and
    the target's GB/s.
    """
    from common import Spread

    script = Path(__file__).resolve()
    processes = [Process(ours.path, script) for _ in range(3)]
    *sources, target = processes
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    try:
        target.do("yield")
        for number in range(rounds):
            for name, kwargs in VARIANTS.items():
                metadata = [
                    s.do("source", kwargs=kwargs, helps=i > 0)["metadata"] for i, s in enumerate(sources)
                ]
                fetch = partial(target.do, "fetch", metadata=metadata, seconds=SECONDS)
                _train(sources, dict, seconds=0.5)  # a warm-up: the first products take longer
                if number % 2:
                    (alone, _), (busy, got) = _train(sources, dict), _train(sources, fetch)
                else:
                    (busy, got), (alone, _) = _train(sources, fetch), _train(sources, dict)
                for source in sources:
                    source.do("end")
                row = {"alone_ms": 1000 * alone, "busy_ms": 1000 * busy, "slower": busy / alone - 1, **got}
                rows[name].append(row)
            progress(
                f"heal sources, round {number + 1}/{rounds}: "
                + ", ".join(f"{name} {100 * row[-1]['slower']:.1f} %" for name, row in rows.items())
            )
    finally:
        for process in processes:
            process.close()
    return {name: {key: vars(Spread.of(r[key] for r in row)) for key in row[0]} for name, row in rows.items()}


def _train(
    sources: list[Process], meanwhile: Any, seconds: float = SECONDS
) -> tuple[float, dict[str, float]]:
    """Return the slower source's median step while another function runs."""
    medians: list[float] = []

    def train(source: Process) -> None:
        medians.append(source.do("train", seconds=seconds)["median_s"])

    threads = [threading.Thread(target=train, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    got = meanwhile()
    for thread in threads:
        thread.join()
    return max(medians), got


def tables(result: dict[str, Any], _ours: str, _upstream: str) -> str:
    """Return the result as Markdown."""
    from common import Spread, markdown_table, verdict

    rows = []
    for name, figures in result.items():
        spread = {key: Spread(**value) for key, value in figures.items()}
        slower = 100 * spread["slower"].median
        rows.append(
            [
                name,
                spread["alone_ms"].middle(1),
                spread["busy_ms"].middle(1),
                f"{slower:.1f} % {verdict(slower < 100 * GOAL)}",
                spread["gb_per_s"].middle(),
            ]
        )
    slower_by = f"slower by (goal < {100 * GOAL:g} %)"
    return markdown_table(
        ["serving", "step alone, ms", "step while serving, ms", slower_by, "target, GB/s"], rows
    )


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).resolve().parent))
    serve_commands(Worker())
