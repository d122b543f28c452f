"""Shared by the benchmarks: the packages under comparison, the processes of a job, and figures with a
spread.
"""

from __future__ import annotations

import mmap
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "process"))

from processes import Child, Event, Job, free_port  # noqa: E402 (found through the line above)

WORKER = Path(__file__).resolve().parent / "worker.py"
START_TIMEOUT_S = 180
Progress = Callable[[str], None]
# Fewer samples than this have no meaningful percentiles.
FEWEST_SAMPLES = 5


@dataclass(frozen=True)
class Side:
    """One of the compared packages: its name in tables, and its directory for PYTHONPATH."""

    name: str
    path: Path


class Workers:
    """Worker processes that run the same command at the same time: all ranks of the two groups of a job."""

    def __init__(self, job: Job, children: Sequence[Child]) -> None:
        self._job, self.children = job, list(children)

    def do(self, timeout: float, **command: Any) -> list[Event]:
        """Send a command to all workers. Wait for their answers, events with the command's name, and return
        these.
        """
        before = {child: len(child.of(command["do"])) for child in self.children}
        for child in self.children:
            child.send(**command)
        self._job.wait(
            lambda: all(len(child.of(command["do"])) > before[child] for child in self.children),
            timeout,
            f"{', '.join(child.name for child in self.children)}: {command['do']}",
        )
        return [child.of(command["do"])[-1] for child in self.children]


def start_group(
    job: Job, side: Side, group: int, ranks: int, peers_port: int, env: dict[str, str] | None = None
) -> list[Child]:
    """Start the ranks of one replica group with the environment that torchrun would give them.

    `peers_port` is the port of the store in which plain process groups across the replica groups meet.
    """
    master_port = free_port()
    return [
        job.python(
            f"{side.name}-{group}.{rank}",
            WORKER,
            path=side.path,
            env={
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(master_port),
                "REPLICA_GROUP_ID": str(group),
                "PEERS_PORT": str(peers_port),
                # Lets several ranks of NCCL 2.30 or newer share a device; their kernels take turns on it.
                "NCCL_MULTI_RANK_GPU_ENABLE": "1",
                **(env or {}),
            },
        )
        for rank in range(ranks)
    ]


def start_groups(job: Job, side: Side, groups: int, ranks: int, env: dict[str, str] | None = None) -> Workers:
    """Start a job's processes and wait until they have imported torch."""
    port = free_port()
    workers = Workers(job, [c for g in range(groups) for c in start_group(job, side, g, ranks, port, env)])
    job.wait(
        lambda: all(child.of("imported") for child in workers.children),
        START_TIMEOUT_S,
        f"{side.name} is imported",
    )
    return workers


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of some samples."""

    median: float
    p10: float
    p90: float
    samples: int

    @staticmethod
    def of(samples: Iterable[float]) -> Spread:
        ordered = sorted(samples)
        return Spread(
            statistics.median(ordered), _quantile(ordered, 0.1), _quantile(ordered, 0.9), len(ordered)
        )

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Format median, 10th and 90th percentile; if there are too few samples for percentiles, their
        number.
        """
        median = f"{self.median:.{digits}f}"
        if self.samples == 1:
            return f"{median}{unit} (one run)"
        if self.samples < FEWEST_SAMPLES:
            return f"{median}{unit} ({self.samples} runs)"
        return f"{median} [{self.p10:.{digits}f}, {self.p90:.{digits}f}]{unit}"

    def middle(self, digits: int = 2) -> str:
        """Format the median alone, for the less important columns of a table."""
        return f"{self.median:.{digits}f}"


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolate between the two samples next to `share`."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def fetch_memory(nbytes: int) -> None:
    """Write to ``nbytes`` of memory, and free them.

    The host of a virtual machine takes back unused memory, and supplies it again at 0.1 to 0.8 GB/s when it
    is used. A call before each measurement keeps that time out of the figures.
    """
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, nbytes, mmap.PAGESIZE):
            memory[start] = 1


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """Rotate the items, so that each round begins with another item."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown that is also readable in a terminal."""
    cells = [list(head), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"
