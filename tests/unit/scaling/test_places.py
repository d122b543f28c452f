"""Kubernetes and Slurm, by fakes of their programs that record how they are called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchft.scaling import Kubernetes, ScalerError, Slurm


class Programs:
    """Programs in a folder of their own on PATH."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = folder / "calls"

    def add(self, name: str, answer: str = "", status: int = 0) -> None:
        """A program that prints an answer; a failure goes to standard error."""
        program = self._folder / name
        variables = "${TORCHFT_RUN_ID-none},${NUM_REPLICA_GROUPS-none}"
        program.write_text(
            f'#!/bin/sh\necho "{name} $* ({variables})" >> {self._calls}\n'
            f"cat <<'END' >&{2 if status else 1}\n{answer}\nEND\nexit {status}\n"
        )
        program.chmod(0o755)

    def calls(self) -> list[str]:
        """The calls since the last look."""
        found = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return found


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("TORCHFT_RUN_ID", "NUM_REPLICA_GROUPS"):
        monkeypatch.delenv(name, raising=False)
    return Programs(tmp_path)


@pytest.mark.parametrize(
    ("answer", "groups"),
    [("4 ", 4), ("4 Suspended", 4), ("4 SuccessCriteriaMet Complete", 0), ("2 FailureTarget Failed", 0)],
)
def test_the_pods_of_a_job(answer: str, groups: int, programs: Programs) -> None:
    programs.add("kubectl", answer)
    assert Kubernetes("groups").current() == groups
    (call,) = programs.calls()
    assert call.startswith("kubectl get job groups -o jsonpath={.spec.parallelism} {.status.conditions[?")


def test_a_job_gets_completions_and_parallelism_at_once(programs: Programs) -> None:
    programs.add("kubectl")
    Kubernetes("team/groups").set(5)
    assert programs.calls() == [
        'kubectl --namespace team patch job groups --type merge --patch {"spec": {"completions": 5, '
        '"parallelism": 5}} (none,none)'
    ]


def test_the_tasks_of_arrays(programs: Programs) -> None:
    """Two arrays, and what squeue says of others: a job without tasks."""
    programs.add("squeue", "17_0\n17_1\n23_2\n40")
    programs.add("scancel")
    programs.add("sbatch", "Submitted batch job 31")
    slurm = Slurm(["groups.sbatch", "train.py", "--steps", "5"], 8, "mine")
    assert slurm.current() == 3
    shown = "squeue --me --array --name=mine --states=PENDING,RUNNING,SUSPENDED --noheader --format=%i"
    assert programs.calls() == [f"{shown} (none,none)"]
    slurm.set(5)
    assert programs.calls()[1:] == [
        "sbatch --job-name=mine --array=3,4 groups.sbatch train.py --steps 5 (none,8)"
    ]
    programs.add("squeue", "17_0\n23_2\n31_3\n31_4")  # the second one has ended
    assert slurm.current() == 5
    programs.calls()
    slurm.set(5)
    assert programs.calls()[1:] == [
        "sbatch --job-name=mine --array=1 groups.sbatch train.py --steps 5 (none,8)"
    ]
    slurm.set(2)
    assert programs.calls()[1:] == ["scancel 31_3 31_4 (none,none)"]
    programs.add("squeue", "")
    assert slurm.current() == 0


def test_an_array_has_the_environment(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_RUN_ID", "mine")
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "16")
    programs.add("squeue", "17_0")
    programs.add("sbatch")
    Slurm(["groups.sbatch"]).set(2)
    assert programs.calls()[1:] == ["sbatch --job-name=torchft-group --array=1 groups.sbatch (mine,16)"]


def test_a_program_that_fails_or_is_missing(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.add("kubectl", 'Error from server (NotFound): jobs.batch "groups" not found', 1)
    with pytest.raises(ScalerError, match=r"kubectl ended with status 1: Error from server \(NotFound\)"):
        Kubernetes("groups").current()
    programs.add("squeue", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    with pytest.raises(ScalerError, match="squeue ended with status 1: slurm_load_jobs error"):
        Slurm(["groups.sbatch"]).set(2)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ScalerError, match="kubectl: No such file or directory"):
        Kubernetes("groups").set(2)
