"""The Slurm scripts, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from test_train_demo import EXAMPLES

SCRIPTS = EXAMPLES / "slurm"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a group with two nodes. srun and torchft_lighthouse print their arguments."""
    commands = tmp_path / "bin"
    commands.mkdir()
    show = "env | grep -E '^(TORCHFT|REPLICA|NUM_REPLICA)' | sort"
    for name, text in {
        "srun": f'{show}\necho "srun $*"',
        "scontrol": "echo node3; echo node4",
        "torchft_lighthouse": 'echo "lighthouse $*"',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SHARED": str(tmp_path / "shared"),
        "SLURM_ARRAY_JOB_ID": "1230",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
    }


def run(script: str, env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPTS / script), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_group_finds_the_lighthouse_and_starts_torchrun_on_all_its_nodes(slurm: dict[str, str]) -> None:
    done = run("lighthouse.sbatch", {**slurm, "MIN_REPLICAS": "3"})
    assert done.stdout == "lighthouse --bind [::]:29510 --min_replicas 3\n", done.stderr
    done = run("groups.sbatch", {**slurm, "NPROC": "8"}, "train_ddp.py", "--steps", "20")
    assert done.returncode == 0, done.stderr
    *env, command = done.stdout.splitlines()
    address = (Path(slurm["SHARED"]) / "lighthouse").read_text().strip()
    assert address.startswith("http://") and address.endswith(":29510")
    assert env == [
        "NUM_REPLICA_GROUPS=4",
        "REPLICA_GROUP_ID=2",
        "TORCHFT_GRACE_S=25",
        f"TORCHFT_LIGHTHOUSE={address}",
        "TORCHFT_RUN_ID=1230",
    ]
    assert "\n#SBATCH --signal=TERM@60\n" in (SCRIPTS / "groups.sbatch").read_text()
    assert "--nnodes 2 --nproc_per_node 8 --max_restarts 3" in command
    port = 20000 + (1234 * 31 + 2) % 9000
    assert command.endswith(f"--rdzv_endpoint node3:{port} --rdzv_id 1234 train_ddp.py --steps 20")


def test_nodes_are_checked_before_a_group_starts(slurm: dict[str, str]) -> None:
    run("lighthouse.sbatch", slurm)
    checked = {**slurm, "CHECK_NODES": "8"}
    done = run("groups.sbatch", checked, "train_ddp.py")
    commands = [line for line in done.stdout.splitlines() if line.startswith("srun ")]
    assert commands[0] == "srun --kill-on-bad-exit=1 torchft doctor --node --nodes 8" and len(commands) == 2
    srun = Path(slurm["PATH"].partition(":")[0]) / "srun"
    srun.write_text('#!/bin/bash\necho "srun $*"\nexit 69\n')
    done = run("groups.sbatch", checked, "train_ddp.py")
    assert done.returncode == 69 and "torchrun" not in done.stdout


def test_errors_name_what_is_missing(slurm: dict[str, str]) -> None:
    done = run("groups.sbatch", {**slurm, "LIGHTHOUSE_TIMEOUT": "1"}, "train_ddp.py")
    assert done.returncode == 1 and "no lighthouse in" in done.stderr
    done = run("groups.sbatch", slurm)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr
    without = {name: value for name, value in slurm.items() if name != "SLURM_ARRAY_TASK_ID"}
    done = run("groups.sbatch", without, "train_ddp.py")
    assert done.returncode == 2 and "submit this as an array" in done.stderr
