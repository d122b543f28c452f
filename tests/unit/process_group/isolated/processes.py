"""Finds the processes of isolated groups in /proc."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path
from typing import Callable

import pytest

from torchft.process_group import ProcessGroupBaby
from torchft.process_group.isolated import standby


def children(pid: int) -> dict[int, str]:
    """Returns the state of each child of a process."""
    states = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid:
            states[int(stat.parent.name)] = state
    return states


def server() -> int:
    running = standby.servers._server
    assert running is not None
    return running.process.pid


def workers() -> set[int]:
    return set(children(server()))


# The case without a standby is slow: it needs a server of its own, which imports PyTorch.
STANDBY_TOO = [pytest.param(False, marks=pytest.mark.slow), True]


def ended(pid: int) -> bool:
    """Whether a process has ended; its parent may not have asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{seconds} s passed before: {what}\n{processes()}"
        time.sleep(0.01)


def processes() -> str:
    """For failure messages: each worker, its age and threads, and the groups of this process that use it."""
    lines = []
    for pid in workers() if standby.servers._server is not None else ():
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(f"/proc/{pid}").st_ctime
            threads = [Path(task, "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()]
            lines.append(f"worker {pid}, {age:.1f} s old, threads {threads}")
    for group in gc.get_objects():
        if isinstance(group, standby.Workers):
            lines.append(f"{group._next=} {group.given=}")
    return "\n".join(lines)


def standing_by(group: ProcessGroupBaby) -> bool:
    """Whether the group's next worker has started, and the trainer has its descriptor."""
    worker = group._workers._next
    return worker is not None and worker._process is not None


def ready_worker() -> int:
    """Returns the only worker, which is on standby."""
    wait_until(lambda: len(workers()) == 1, "the worker stands by")
    found = workers()
    assert len(found) == 1, processes()
    return found.pop()


def stop(pid: int) -> None:
    """Waits until the process is stopped: before that a server may still fork a worker, and a worker may
    still answer.
    """
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", f"process {pid} is stopped")


def worker() -> int:
    """Returns the worker of the only group: the one with threads of Gloo. The previous group's worker
    may still exist.
    """
    found: list[int] = []

    def alone() -> bool:
        found.clear()
        with contextlib.suppress(FileNotFoundError):
            found.extend(pid for pid in workers() if len(os.listdir(f"/proc/{pid}/task")) > 1)
            return len(found) == 1
        return False

    wait_until(alone, "there is one worker")
    return found[0]
