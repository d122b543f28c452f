"""A small version of `make train-fsdp`: a rank of a sharded group is killed, and each new rank heals its own
shard.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train_demo import EXAMPLES, ROOT, environment, read_events
from torch.distributed.fsdp import FSDPModule
from waiting import wait_for

from torchft.coordination import LighthouseServer
from torchft.launch.group import ReplicaGroup

__all__ = ["environment"]  # a fixture

# PyTorch 2.7's fully_shard asserts an event of an accelerator when it has reduced over the replicas.
pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="PyTorch 2.7 has no HSDP on a CPU"
)

needs_exact_shards = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="refused in this PyTorch"
)


@pytest.mark.slow  # test_hsdp has a rank of a sharded group that is killed
@pytest.mark.timeout(240)
def test_a_rank_is_killed_and_all_end_with_equal_weights(environment: dict[str, str], tmp_path: Path) -> None:
    command = [
        *(sys.executable, str(EXAMPLES / "demo.py"), "--script", "train_fsdp", "--nproc", "2"),
        *(
            "--kill",
            "rank",
            "--steps",
            "200",
            "--kill-at",
            "15",
            "--time-limit",
            "200",
            "--logs",
            str(tmp_path),
        ),
    ]
    done = subprocess.run(
        command, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=220
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 1 killed" in done.stdout and done.stdout.splitlines()[-1] == "equal"
    digests = re.findall(r"group \d rank \d  ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert len(digests) == 4 and len(set(digests)) == 1

    survivor = read_events(tmp_path, 0)
    commits = [event["step"] for event in survivor if event["event"] == "commit"]
    assert commits == list(range(commits[0], commits[0] + len(commits)))
    assert {event["participants"] for event in survivor if event["event"] == "commit"} == {1, 2}
    assert sum(event["event"] == "start" for event in survivor) == 1  # the survivor never ended
    for rank in range(2):  # both ranks were restarted, and healed
        lines = (tmp_path / "events" / f"group-1-rank-{rank}.jsonl").read_text().splitlines()
        victim = [json.loads(line) for line in lines]
        again = [event["event"] for event in victim].index("start", 1)
        back = next(event for event in victim[again:] if event["event"] == "commit")
        assert back["healing"] and back["step"] > 15
        assert set(back["recovery"]) == {"quorum", "reconfigure", "transfer", "load"}


def digests(folder: Path, number: int, killed: int = 0) -> set[str]:
    """The digests of the weights that the ranks of a reproducible job end with.

    Args:
        folder: for logs.
        number: groups of two ranks.
        killed: groups that are killed after step 50, in which all take part.
    """
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=number - killed, join_timeout_ms=60000)
    options = ["--reproducible", "--steps=60", "--batch-size=48", "--device=cpu"]
    command = [str(ROOT / "train_fsdp.py"), *options]
    groups = [ReplicaGroup(i, number, command, folder / f"{number}-{i}.log", nproc=2) for i in range(number)]
    living, dying = groups[killed:], groups[:killed]
    try:
        for group in groups:
            group.start(lighthouse.address())
        if dying:
            wait_for(lambda: "step 50 loss" in living[0].log.read_text(), "step 50", seconds=100)
        for group in dying:
            group.kill()
        wait_for(lambda: all(group.status is not None for group in living), "the end", seconds=100)
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()
    logs = [group.log.read_text() for group in living]
    assert not dying or all(re.search(rf"step 50 loss .* groups {number}$", log, re.M) for log in logs)
    # Two ranks may print at once: Python writes the end of a line by itself, so two lines may be joined.
    found = [re.findall(r"sha256 of the weights ([0-9a-f]{64})", log) for log in logs]
    assert all(len(each) == 2 for each in found), logs
    return {digest for each in found for digest in each}


@needs_exact_shards
@pytest.mark.slow  # test_loader.py has a loop without torchft.Job, and the weights of one process
@pytest.mark.timeout(300)
def test_reproducible_jobs_of_one_group_and_of_two_with_a_kill_end_alike(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (alone,) = digests(tmp_path, 1)
    assert digests(tmp_path, 2, killed=1) == {alone}
