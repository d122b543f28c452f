"""Starting processes that end with their parent, and killing whole trees of them (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from torchft.launch.exec import COMM, STANDS_FOR, Forked


def start(
    command: list[str], log: Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Starts a command in a new session; its output is appended to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def python(code: str) -> list[str]:
    """The command line of a program that finds the modules that this process finds: not the torchft of the
    current directory, which may be a folder of sources.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]


def end_with_parent() -> None:
    """Makes the kernel kill this process with its parent."""
    # Even a SIGKILL of this program leaves nothing behind. PR_SET_PDEATHSIG is 1.
    _libc.prctl(1, signal.SIGKILL)


_libc = ctypes.CDLL(None)  # before the fork, so that nothing is imported or loaded in the child


def tree(pid: int) -> list[int]:
    """The process and its descendants, parents first. What a process stands for counts as its child."""
    parents = {child: parent for child, parent, _ in _processes()}
    found = [pid]
    for known in found:  # grows while it is walked
        children = [child for child, parent in parents.items() if parent == known]
        found += [child for child in [*children, *_stands_for(known)] if child not in found]
    return found


def _stands_for(pid: int) -> list[int]:
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() != COMM:
            return []
        shown = Path(f"/proc/{pid}/fdinfo/{STANDS_FOR}").read_text().splitlines()
    except OSError:  # the process has ended meanwhile
        return []
    pids = [int(line.split()[1]) for line in shown if line.startswith("Pid:")]
    return [forked for forked in pids if forked > 0]  # -1: it has ended


def kill_tree(process: subprocess.Popen[bytes] | Forked) -> list[int]:
    """Sends SIGKILL to a process and all of its descendants, as if their host had failed.

    Returns their pids. torchrun starts each worker in a new session, so a signal to the process group of the
    agent would not reach them.
    """
    if process.poll() is not None:
        return []
    pids = [process.pid]
    while True:  # all are stopped first, until no new process is found, because a stopped process cannot fork
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        found = tree(process.pid)
        if set(found) <= set(pids):
            break
        pids = found
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    process.wait()
    return pids


def alive(pids: list[int]) -> list[int]:
    """Returns the ids of the processes that still run. Zombies do not count."""
    return [pid for pid, _, state in _processes() if pid in pids and state not in "ZX"]


def _processes() -> list[tuple[int, int, str]]:
    """(pid, pid of the parent, state) of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may itself hold spaces and parentheses.
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:  # the process has ended meanwhile
            continue
        found.append((int(path.parent.name), int(parent), state))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
