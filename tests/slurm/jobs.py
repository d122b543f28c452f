"""A job on the cluster, by the scripts in python/examples/slurm."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from machines import Cluster, Machine, wait_for

SCRIPTS = Path(__file__).parents[2] / "python" / "examples" / "slurm"
STEPS = str(Path(__file__).with_name("steps.py"))
ENDLESS = "100000"  # steps
RANK = r"^[^ ]*python[^ ]* -u [^ ]*(steps|train_ddp)\.py"  # the command line of a rank
# PyTorch's start on a machine whose processors are all busy.
START_S = 600.0
ENDED = {"COMPLETED", "FAILED"}


class Job:
    """A job whose files are in `folder`.

    Attributes:
        id: the Slurm id of its lighthouse, which is the job's.
        groups: the Slurm ids of the elements, by the number of their group.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.logs = folder / "torchft-logs"
        self.logs.mkdir(exist_ok=True)
        self.groups: dict[int, str] = {}
        self.id = ""
        self._submitted: list[str] = []
        self._env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(SCRIPTS.parents[2]),
            "TORCHFT_SNAPSHOT_MEMORY": "/dev/shm/torchft",
        }

    def submit(self, *args: str, **env: str) -> str:
        """Submits a script, and returns its Slurm id."""
        command = ("sbatch", "--parsable", *args)
        id = self.cluster.slurm(*command, cwd=self.folder, **self._env, LIGHTHOUSE_JOB=self.id, **env).strip()
        self._submitted.append(id)
        return id

    def start_lighthouse(self, *options: str, min_replicas: int = 1, **env: str) -> None:
        script = str(SCRIPTS / "lighthouse.sbatch")
        self.id = self.submit(*options, script, MIN_REPLICAS=str(min_replicas), **env)

    def start_groups(self, array: str, *script: str, options: tuple[str, ...] = (), **env: str) -> None:
        """Submits an array of groups, such as "0-1"; `script` is what they run."""
        first, _, last = array.partition("-")
        id = self.submit(f"--array={array}", *options, str(SCRIPTS / "groups.sbatch"), *script, **env)
        for number in range(int(first), int(last or first) + 1):
            self.groups[number] = f"{id}_{number}"

    def shell(self, commands: str) -> str:
        """Runs commands of a page on the controller, in the folder of the job."""
        return self.cluster.slurm("bash", "-euc", commands, cwd=self.folder, **self._env)

    def adopt(self, shown: str, groups: int) -> None:
        """Takes over what commands have submitted: `shown` is the array's id, then that of the lighthouse."""
        array, self.id = re.findall(r"\d+", shown)
        self.groups = {number: f"{array}_{number}" for number in range(groups)}
        self._submitted += [self.id, array]

    def state(self, id: str) -> str:
        return self.cluster.jobs()[id][0]

    def node(self, id: str) -> Machine:
        """The node on which a job of Slurm runs."""
        return self.cluster.nodes[self.cluster.jobs()[id][1]]

    def wait_for_state(self, id: str, state: str, seconds: float = START_S) -> float:
        def reached() -> bool:
            now = self.state(id)
            assert not {now, state} <= ENDED or now == state, f"{id} is {now}, expected: {state}"
            return now == state

        return wait_for(f"{id} is {state}", reached, seconds)

    def output(self, number: int) -> str:
        """What a group has printed, in all of its lives."""
        path = self.logs / f"torchft-group-{self.groups[number]}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self, number: int) -> list[tuple[int, int]]:
        """Each step that a group has made, and how many groups took part."""
        return [
            (int(s), int(g)) for s, g in re.findall(r"step (\d+) .*groups (\d+)$", self.output(number), re.M)
        ]

    def wait_for_steps(
        self, number: int, count: int = 5, groups: int | None = None, seconds: float = START_S
    ) -> float:
        """Waits until a group has made `count` more steps, in which `groups` took part."""
        before = len(self.steps(number))
        what = f"group {number} makes {count} steps with {groups} groups"

        def made() -> bool:
            return sum(groups in (None, g) for _, g in self.steps(number)[before:]) >= count

        return wait_for(what, made, seconds)

    def torchft(self, *args: str) -> str:
        """Runs a command of torchft on the controller."""
        address = f"{self.logs}/{self.id}/lighthouse"
        return self.cluster.controller.run(
            "torchft", *args, "--lighthouse", address, "--job", f"slurm-{self.id}", **self._env
        )

    def seconds(self, what: str, took: float) -> None:
        """Prints a measured time: `pytest -s` shows it."""
        print(f"\n{what}: {took:.1f} s")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.torchft("events", "--json").splitlines()]

    def close(self) -> None:
        if self._submitted:
            self.cluster.slurm("scancel", *self._submitted)
