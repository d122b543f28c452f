"""One replica group: a torchrun process and all its descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchft._nccl_env import DUMP_ENV, dump_setting
from torchft.addresses import loopback
from torchft.launch import process_tree
from torchft.launch.exec import NAME_ENV, Forked
from torchft.launch.owned import AGENT, ReadyProcess

# PyTorch's stores ask the name server for the name of each address that connects. With glibc's own settings a
# lost answer costs 5 s, and in a step in which groups change all of them wait.
_RESOLVER = "timeout:1 attempts:3"
# How often torchrun looks whether a rank has ended; its default is 0.1 s. A look takes some 0.2 ms.
_MONITOR_SEC = "0.03"
_EXEC = Path(__file__).with_name("exec.py")

# Of the Manager; its default is for scripts that something else starts.
_SNAPSHOTS = "TORCHFT_SNAPSHOTS"


def environment(nproc: int) -> dict[str, str]:
    """What the environments of all groups have in common, beside that of this process."""
    # A script may import torchft only after it has made its world.
    own = {DUMP_ENV: dump_setting(), "RES_OPTIONS": os.environ.get("RES_OPTIONS", _RESOLVER)}
    own[_SNAPSHOTS] = os.environ.get(_SNAPSHOTS, "auto")
    if nproc > 1:  # as torchrun, which would say so
        own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    return own


class ReplicaGroup:
    """Starts, stops and restarts the processes of one group.

    Args:
        number: the group's number, ``REPLICA_GROUP_ID`` in the environment of its processes.
        groups: largest number of groups of the job, ``NUM_REPLICA_GROUPS`` in that environment.
        command: the script and its arguments.
        log: file to which the output of all processes is appended, at the first start and at each restart.
        nproc: number of ranks, torchrun's ``--nproc_per_node``.
        torchrun_args: further arguments for torchrun.
        ready: the process from which torchrun and the ranks are forked; None: torchrun starts in the ordinary
            way, and its ranks are forked from a process of torchrun.
    """

    def __init__(
        self,
        number: int,
        groups: int,
        command: list[str],
        log: Path,
        nproc: int = 1,
        torchrun_args: list[str] | None = None,
        ready: ReadyProcess | None = None,
    ) -> None:
        self.number = number
        self.groups = groups
        self.nproc = nproc
        self.log = log
        self.starts = 0
        self.started = 0.0  # wall-clock time of the latest start, in seconds
        self._command = command
        self._torchrun_args = torchrun_args or []
        self._ready = ready
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def start(self, lighthouse: str, env: dict[str, str] | None = None) -> None:
        """Starts the group, or restarts it after it has ended.

        Args:
            lighthouse: address of the lighthouse, ``TORCHFT_LIGHTHOUSE`` for the group.
            env: further environment variables, which override those that this class sets.
        """
        start = ["--no-python", sys.executable, "-I", "-S", str(_EXEC)]
        args = [
            "--rdzv_backend",
            "torchft-host",
            "--rdzv_endpoint",  # not used; without one torchrun warns in each log
            loopback(),
            "--nproc_per_node",
            str(self.nproc),
            "--monitor_interval",
            _MONITOR_SEC,
            *self._torchrun_args,
            *start,
            *self._command,
        ]
        own = {
            **environment(self.nproc),
            "REPLICA_GROUP_ID": str(self.number),
            "NUM_REPLICA_GROUPS": str(self.groups),
            "TORCHFT_LIGHTHOUSE": lighthouse,
            **({} if self._ready is None else {NAME_ENV: self._ready.name}),
            **(env or {}),
        }
        self.starts += 1
        self.started = time.time()
        self._process = (
            None if self._ready is None else self._ready.agent(args, self.log, {**os.environ, **own})
        )
        if self._process is None:
            self._process = process_tree.start([sys.executable, "-m", AGENT, *args], self.log, own)

    def kill(self) -> list[int]:
        """Sends SIGKILL to torchrun and all its descendants. Returns their pids."""
        return [] if self._process is None else process_tree.kill_tree(self._process)

    def terminate(self) -> None:
        """Asks torchrun to end its workers and itself."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    @property
    def pid(self) -> int:
        """Process id of torchrun's agent."""
        assert self._process is not None, "the group was not started"
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of torchrun; None while it runs, and before the first start."""
        return None if self._process is None else self._process.poll()
