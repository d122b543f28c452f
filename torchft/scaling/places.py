"""Where the number of a job's replica groups is kept, and how it is changed there."""

from __future__ import annotations

import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

_COMMAND_SEC = 60.0


class ScalerError(Exception):
    """The number of groups could not be read or set; a later attempt may succeed."""


class Scaler(ABC):
    """Reads and sets the number of groups of one job. Derive from it for another scheduler."""

    @abstractmethod
    def current(self) -> int:
        """The number of groups that is asked for, whether or not they run; 0: the job has ended.

        Raises:
            ScalerError: it is not known at present.
        """

    @abstractmethod
    def set(self, groups: int) -> None:
        """Asks for another number of groups, of at least 1. Groups that are too many have to get SIGTERM.

        Raises:
            ScalerError: it is not possible at present.
        """


class Kubernetes(Scaler):
    """The number of pods of an indexed Job: its ``completions`` and ``parallelism``, which stay equal.

    With equal numbers a Job removes the pods of the highest indexes, and makes them anew when it grows. It
    needs kubectl, and Kubernetes 1.27 or newer.

    Args:
        job: name of the Job, or ``NAMESPACE/NAME``.
    """

    def __init__(self, job: str) -> None:
        namespace, _, self._name = job.rpartition("/")
        self._options = ["--namespace", namespace] if namespace else []

    def current(self) -> int:
        conditions = '{.status.conditions[?(@.status=="True")].type}'
        shown = self._kubectl("get", "job", self._name, "-o", f"jsonpath={{.spec.parallelism}} {conditions}")
        number, *true = shown.split()
        return 0 if {"Complete", "Failed"} & set(true) else int(number)

    def set(self, groups: int) -> None:
        patch = f'{{"spec": {{"completions": {groups}, "parallelism": {groups}}}}}'
        self._kubectl("patch", "job", self._name, "--type", "merge", "--patch", patch)

    def _kubectl(self, *arguments: str) -> str:
        return _run(["kubectl", *self._options, *arguments])


class Slurm(Scaler):
    """The tasks of job arrays of one name. It submits further arrays, and cancels the last tasks.

    A number stays what it was set to: a task that ended, and that Slurm does not requeue, is replaced when
    the number is set again. ``sbatch`` passes the environment on: LIGHTHOUSE_JOB, for the example's script.

    Args:
        command: the script of the tasks, and its arguments, as for ``sbatch``.
        most: largest number of groups, NUM_REPLICA_GROUPS of the tasks; None: as in the environment.
        name: name of the arrays.
    """

    def __init__(self, command: Sequence[str], most: int | None = None, name: str = "torchft-group") -> None:
        self._command = list(command)
        self._groups = {} if most is None else {"NUM_REPLICA_GROUPS": str(most)}
        self._name = name
        self._wanted: int | None = None

    def current(self) -> int:
        tasks = self._tasks()
        if not tasks:
            return 0
        if self._wanted is None:
            self._wanted = len(tasks)
        return self._wanted

    def set(self, groups: int) -> None:
        tasks = self._tasks()
        if surplus := [tasks[index] for index in sorted(tasks)[groups:]]:
            _run(["scancel", *surplus])
        if missing := [i for i in range(groups) if i not in tasks][: max(0, groups - len(tasks))]:
            array = ",".join(map(str, missing))
            _run(["sbatch", f"--job-name={self._name}", f"--array={array}", *self._command], self._groups)
        self._wanted = groups

    def _tasks(self) -> dict[int, str]:
        """The ids of tasks that run, or will, by their number in the job."""
        states = "--states=PENDING,RUNNING,SUSPENDED"
        which = ["--me", "--array", f"--name={self._name}", states]
        shown = _run(["squeue", *which, "--noheader", "--format=%i"])
        return {int(task.rpartition("_")[2]): task for task in re.findall(r"\d+_\d+", shown)}


def _run(command: list[str], env: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=_COMMAND_SEC
        )
    except subprocess.TimeoutExpired:
        raise ScalerError(f"{command[0]} timed out: it did not end within {_COMMAND_SEC:g} s") from None
    except OSError as e:
        raise ScalerError(f"{command[0]}: {e.strerror}") from None
    if done.returncode:
        raise ScalerError(
            f"{command[0]} ended with status {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    return done.stdout
