"""One replica group: a torchrun with everything below it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from torchft.launch import process_tree


class ReplicaGroup:
    """Starts, ends and starts again the processes of one group.

    Args:
        number: REPLICA_GROUP_ID of its processes.
        groups: NUM_REPLICA_GROUPS.
        command: the script and its arguments.
        log: gets the output of all its processes, of all lives.
        nproc: ranks.
        torchrun_args: further arguments for torchrun.
    """

    def __init__(
        self,
        number: int,
        groups: int,
        command: list[str],
        log: Path,
        nproc: int = 1,
        torchrun_args: list[str] | None = None,
    ) -> None:
        self.number = number
        self.groups = groups
        self.nproc = nproc
        self.log = log
        self.starts = 0
        self.started = 0.0  # when it was started last, by the wall clock
        self._command = command
        self._torchrun_args = torchrun_args or []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, lighthouse: str, env: dict[str, str] | None = None) -> None:
        """Starts the group, or starts it again after its end."""
        # standalone: a free port for each group, which older releases of torchrun do not take by themselves
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.nproc)]
        own = {
            "REPLICA_GROUP_ID": str(self.number),
            "NUM_REPLICA_GROUPS": str(self.groups),
            "TORCHFT_LIGHTHOUSE": lighthouse,
        }
        self.starts += 1
        self.started = time.time()
        command = [*torchrun, *self._torchrun_args, *self._command]
        self._process = process_tree.start(command, self.log, {**own, **(env or {})})

    def kill(self) -> list[int]:
        """SIGKILL for torchrun and everything below it. Returns the pids."""
        return [] if self._process is None else process_tree.kill_tree(self._process)

    def terminate(self) -> None:
        """Asks torchrun to end its workers and itself."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    @property
    def pid(self) -> int:
        """Of torchrun's agent."""
        assert self._process is not None, "the group was not started"
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of torchrun, None while it runs."""
        return None if self._process is None else self._process.poll()
