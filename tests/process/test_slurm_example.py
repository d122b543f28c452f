"""The Slurm scripts, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_train_demo import EXAMPLES

SCRIPTS = EXAMPLES / "slurm"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a group with two nodes of eight ranks. srun and torchft_lighthouse print their
    arguments; `statuses` has the exit statuses of the ranks for each srun, in the order of their ends.
    """
    commands = tmp_path / "bin"
    commands.mkdir()
    show = "env | grep -E '^(TORCHFT|REPLICA|NUM_REPLICA|MASTER|WORLD)' | sort"
    ranks = (
        'read -r statuses rest <<< "$(cat statuses 2> /dev/null)"; echo "$rest" > statuses; highest=0\n'
        "while [[ $1 = --* ]]; do shift; done\n"
        "for STATUS in ${statuses//,/ }; do\n"
        '    STATUS=$STATUS "$@" > /dev/null; [ $? -le $highest ] || highest=$STATUS\n'
        "done; exit $highest"
    )
    for name, text in {
        "srun": f"{show}\necho srun $*\n{ranks}",
        "scontrol": '[ "$1" = show ] && { echo node3; echo node4; } || echo "scontrol $*"',
        "sleep": "",
        "torchft": 'echo "{\\"ended\\": \\"$ENDED\\"}"; exit ${STATUS:-0}',
        "torchft_lighthouse": 'echo "lighthouse $*"; cp elsewhere torchft-logs/1230/lighthouse',
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    address = tmp_path / "torchft-logs" / "1230" / "lighthouse"
    address.parent.mkdir(parents=True)
    address.write_text("http://node1:29230\n")
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "LIGHTHOUSE_JOB": "1230",
        "SLURM_ARRAY_JOB_ID": "1232",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_ARRAY_TASK_COUNT": "4",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "16",
    }


@pytest.fixture
def run(slurm: dict[str, str], tmp_path: Path) -> Run:
    def run(script: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPTS / script), *args]
        return subprocess.run(
            command, env={**slurm, **env}, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    return run


def test_a_lighthouse_is_started_again_until_there_is_another_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("http://node2:29230\n")
    done = run("lighthouse.sbatch", SLURM_JOB_ID="1230", MIN_REPLICAS="5")
    folder = tmp_path / "torchft-logs" / "1230"
    assert done.stdout == f"lighthouse --bind [::]:29230 --min_replicas 5 --state_dir {folder}/state\n"
    assert (folder / "lighthouse").read_text() == "http://node2:29230\n", "that of the other one"


@pytest.mark.parametrize("now", ["http://node2:29230\n", None])
def test_a_lighthouse_that_is_ended_leaves_the_address_of_another_one(
    run: Run, tmp_path: Path, now: str | None
) -> None:
    """Its node had hung, and slurmd ends the script before it has read its file again."""
    address = tmp_path / "torchft-logs" / "1230" / "lighthouse"
    moves = "" if now is None else f"echo {now.strip()} > {address}; "
    (tmp_path / "bin" / "sleep").write_text(f"#!/bin/bash\n{moves}kill -TERM $PPID\n")
    (tmp_path / "bin" / "torchft_lighthouse").write_text("#!/bin/bash\nexec tail -f /dev/null\n")
    done = run("lighthouse.sbatch", SLURM_JOB_ID="1230")
    assert done.returncode == 0, done.stderr
    assert (address.read_text() if address.exists() else None) == now


def test_a_group_has_the_settings_of_its_job(run: Run, tmp_path: Path) -> None:
    done = run("groups.sbatch", "train_ddp.py", "--steps", "20")
    assert done.returncode == 0, done.stderr
    *env, command, end = done.stdout.splitlines()
    assert env == [
        "MASTER_ADDR=node3",
        f"MASTER_PORT={20000 + (1234 * 31 + 2) % 9000}",
        "NUM_REPLICA_GROUPS=4",
        "REPLICA_GROUP_ID=2",
        "TORCHFT_CONNECT_TIMEOUT_SEC=900",
        "TORCHFT_GRACE_S=25",
        "TORCHFT_JOB_ID=slurm-1230",
        f"TORCHFT_LIGHTHOUSE={tmp_path}/torchft-logs/1230/lighthouse",
        "TORCHFT_QUORUM_TIMEOUT_SEC=900",
        "TORCHFT_RUN_ID=1230",
        "WORLD_SIZE=16",
    ]
    assert command.startswith("srun --kill-on-bad-exit=1 bash -c trap : TERM ")
    assert " RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID torchft exec " in command
    assert command.endswith(" - train_ddp.py --steps 20") and end == "group 2 ended with status 0"
    assert "\n#SBATCH --signal=TERM@60\n" in (SCRIPTS / "groups.sbatch").read_text()


@pytest.mark.parametrize(
    ("statuses", "status", "starts", "requeued"),
    [
        ("1 0", 0, 2, False),
        ("1 1 1 1", 1, 4, True),
        ("137 137 137 137", 137, 4, True),
        ("65", 65, 1, False),  # the job stops
        ("69", 69, 1, False),  # the node is bad
        ("1 143", 143, 2, False),  # it was to drain, and has not done so in time
        ("1 66", 1, 2, False),  # the script failed behind its loop
        ("137 66", 0, 2, False),  # it was killed there: the script of another group ran to its end
        # Of several ranks: srun ends the others when the first one has failed.
        ("1,143,137 0", 0, 2, False),
        ("137,143 0", 0, 2, False),
        ("65,143,137", 65, 1, False),
        ("1,65,143", 65, 1, False),
        ("0,143,137", 143, 1, False),
        ("1,143 66,143", 1, 2, False),
    ],
)
def test_ends_of_a_group(
    run: Run, tmp_path: Path, statuses: str, status: int, starts: int, requeued: bool
) -> None:
    """The training was complete when it ended."""
    (tmp_path / "statuses").write_text(f"{statuses}\n")
    done = run("groups.sbatch", "train_ddp.py", ENDED="1230")
    assert done.returncode == status, done.stderr
    assert done.stdout.count("\nsrun ") == starts
    assert done.stdout.count("TORCHFT_RETURNS=1") == starts - 1
    assert ("scontrol requeue 1234" in done.stdout) == requeued


def test_a_group_that_failed_before_the_end_of_the_training_may_be_late(run: Run, tmp_path: Path) -> None:
    (tmp_path / "statuses").write_text("1 66\n")
    assert run("groups.sbatch", "train_ddp.py", ENDED="").returncode == 0


def test_requeues_are_counted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "statuses").write_text("1\n")
    done = run("groups.sbatch", "train_ddp.py", MAX_RESTARTS="0", MAX_REQUEUES="5", SLURM_RESTART_COUNT="5")
    assert done.returncode == 1 and "scontrol requeue" not in done.stdout


def test_nodes_are_checked_before_a_group_starts(run: Run, tmp_path: Path) -> None:
    done = run("groups.sbatch", "train_ddp.py", CHECK_NODES="8")
    commands = [line for line in done.stdout.splitlines() if line.startswith("srun ")]
    check = "srun --kill-on-bad-exit=1 --ntasks=2 --ntasks-per-node=1 torchft doctor --node --nodes 8"
    assert commands[0] == check and len(commands) == 2
    (tmp_path / "statuses").write_text("69\n")
    done = run("groups.sbatch", "train_ddp.py", CHECK_NODES="8")
    assert done.returncode == 69 and "torchft exec" not in done.stdout


def test_errors_name_what_is_missing(run: Run) -> None:
    done = run("groups.sbatch", "train_ddp.py", LIGHTHOUSE_JOB="7", LIGHTHOUSE_TIMEOUT="1")
    assert done.returncode == 1 and "no lighthouse after 1 s: " in done.stderr
    done = run("groups.sbatch")
    assert done.returncode == 2 and "usage: sbatch" in done.stderr
    done = run("groups.sbatch", "train_ddp.py", SLURM_ARRAY_TASK_ID="")
    assert done.returncode == 2 and "submit this as an array" in done.stderr
    done = run("groups.sbatch", "train_ddp.py", LIGHTHOUSE_JOB="")
    assert done.returncode == 2 and "sbatch --parsable lighthouse.sbatch" in done.stderr
