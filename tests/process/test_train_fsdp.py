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

__all__ = ["environment"]  # a fixture

# PyTorch 2.7's fully_shard asserts an event of an accelerator when it has reduced over the replicas.
pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="PyTorch 2.7 has no HSDP on a CPU"
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
