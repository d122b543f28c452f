"""One replica group, a torchrun of a training script, and its events."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchft.launch.group import ReplicaGroup
from torchft.launch.owned import ReadyProcess

TRAIN_SCRIPT = Path(__file__).resolve().parent / "train_demo.py"  # train_ddp.py, with events
Event = dict[str, Any]


class Group:
    """Starts, follows and kills a group. Its events and its log are in `folder`.

    `events` are those of rank 0. Times are wall-clock times in seconds.
    """

    def __init__(
        self,
        number: int,
        groups: int,
        folder: Path,
        nproc: int = 1,
        script: Path = TRAIN_SCRIPT,
        ready: ReadyProcess | None = None,
    ) -> None:
        self.number = number
        self.nproc = nproc
        self._script = script
        self._ready = ready
        self._rank_killed = math.nan
        self.log = folder / f"group-{number}.log"
        self.state = "not started"
        self.stands_in = False  # for a group that was killed
        self.events: list[Event] = []
        self._folder = folder / "events"
        self._groups = groups
        self._process: ReplicaGroup | None = None
        self._offset = 0
        self._restarted = False
        self._healed = False  # whether it has healed since its restart

    def start(self, lighthouse: str, train_args: list[str], torchrun_args: list[str] | None = None) -> None:
        """Starts the group, or restarts it after `kill`."""
        self._restarted = self._process is not None
        self.state = "starting again" if self._restarted else "starting"
        self._healed = False
        self._rank_killed = math.nan
        command = [str(self._script), "--events", str(self._folder), *train_args]
        self._process = ReplicaGroup(
            self.number, self._groups, command, self.log, self.nproc, torchrun_args, self._ready
        )
        self._process.start(lighthouse)

    def kill(self) -> list[int]:
        """Sends SIGKILL to torchrun and all its descendants. Returns their pids."""
        pids = [] if self._process is None else self._process.kill()
        if pids:
            self.follow()  # the last events before the kill belong to this incarnation
            self.state = "killed"
        return pids

    def kill_rank(self, rank: int) -> None:
        """Sends SIGKILL to one of its ranks. torchrun restarts all of them, if it was started with
        --max_restarts.
        """
        starts = [event for event in self._read(rank) if event["event"] == "start"]
        self._rank_killed = time.time()
        os.kill(starts[-1]["pid"], signal.SIGKILL)
        self.follow()
        self._restarted, self._healed = True, False
        self.state = f"rank {rank} killed"

    def takes_over(self) -> None:
        """Declares that another group was killed just now, in whose place this standby comes."""
        self._rank_killed = time.time()
        self._restarted = self.stands_in = True

    @property
    def started(self) -> float:
        """Time of the last start, or of the later kill of a rank, after which torchrun restarts all ranks, or
        of the group in whose place this standby comes.
        """
        if self._process is None:
            return math.nan
        return self._process.started if math.isnan(self._rank_killed) else self._rank_killed

    @property
    def pid(self) -> int:
        """Process id of torchrun's agent."""
        assert self._process is not None
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status of torchrun; None while it runs."""
        return None if self._process is None else self._process.status

    def follow(self) -> None:
        """Reads the events that were written since the last call."""
        path = self._events_file(rank=0)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                self._offset += len(line)
                self._take(json.loads(line))

    def _take(self, event: Event) -> None:
        if event["event"] == "trained":  # an event for accounting.py
            return
        self.events.append(event)
        if event["event"] == "start" and self.started < event["time"]:
            self.state = "starting again" if len(self.events) > 1 else "starting"
        elif event["event"] == "end":
            self.state = "done"
        elif event["event"] == "commit":
            # A group that starts a little later than the others heals too, which is no return.
            self._healed = self._healed or (self._restarted and event["healing"] and event["step"] > 1)
            self.state = "training, healed" if self._healed else "training"

    def commits(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "commit"]

    def losses(self) -> list[Event]:
        return [event for event in self.events if event["event"] == "lost"]

    def step(self) -> int:
        """The number of committed steps so far."""
        return self.events[-1]["step"] if self.events else 0

    def everything(self) -> list[Event]:
        """The events of all ranks and incarnations."""
        return [event for rank in range(self.nproc) for event in self._read(rank)]

    def ends(self) -> list[Event]:
        """The last event of every rank."""
        return [self._read(rank)[-1] for rank in range(self.nproc)]

    def _read(self, rank: int) -> list[Event]:
        return [json.loads(line) for line in self._events_file(rank).read_text().splitlines()]

    def next_commit(self, killed_at: float) -> float | None:
        """Seconds from the kill of another group to the first step committed without it.

        A step that was almost complete at the kill may still be committed right after it; it does not count.
        """
        for event in self.commits():
            if event["time"] > killed_at and event["participants"] < self._groups:
                return event["time"] - killed_at
        return None

    def steps_between(self, begin: float, end: float) -> list[float]:
        """The seconds of each step that was committed, if a part of it lies between two times."""
        times = [event["time"] for event in self.commits()]
        return [later - earlier for earlier, later in pairwise(times) if later > begin and earlier < end]

    def time_to_heal(self) -> float | None:
        """Seconds from the last start (Python and PyTorch included) to the first step with the others'
        weights.
        """
        healed = self._first_heal()
        return None if healed is None else healed["time"] - self.started

    def recovery(self, phase: str) -> float | None:
        """The seconds of a phase of the first heal since the last start; names as in
        `Manager.recovery_seconds`.
        """
        healed = self._first_heal()
        return None if healed is None else (healed.get("recovery") or {}).get(phase)

    def _first_heal(self) -> Event | None:
        """The first step since the last start that was committed with the others' weights."""
        for event in self.commits():
            if event["time"] > self.started and event["healing"] and event["step"] > 1:
                return event
        return None

    def time_to_start(self) -> float | None:
        """Seconds from the last start until Python, PyTorch and the data were ready."""
        for event in self.events:
            if event["time"] > self.started and event["event"] == "start":
                return event["time"] - self.started
        return None

    def _events_file(self, rank: int) -> Path:
        return self._folder / f"group-{self.number}-rank-{rank}.jsonl"
