"""FSDP2 and an ElasticDataLoader: two groups of two ranks, one is killed, and the weights are those of one process."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from causes import SILENCE_MS
from loader_model import one_process
from processes import HERE, START_TIMEOUT_S, Child, Job, free_port, ours_path

pytestmark = [
    pytest.mark.slow,  # six processes that import PyTorch
    # PyTorch 2.7's fully_shard asserts an event of an accelerator when it has reduced over the replicas.
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="PyTorch 2.7 has no HSDP on a CPU"
    ),
    pytest.mark.timeout(300),
]

RANKS = 2


def start(job: Job, lighthouse: str, group: int, **options: int) -> list[Child]:
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    more = [f"--{name}={value}" for name, value in {"seed": 0, **options}.items()]
    return [
        job.python(
            f"group{group}-{rank}",
            Path(HERE) / "loader_worker.py",
            f"--group={group}",
            f"--lighthouse={lighthouse}",
            *more,
            path=ours_path(),
            env={**env, "RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]


def test_a_group_is_killed_and_comes_back() -> None:
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=SILENCE_MS
        )
        first = start(job, lighthouse, 0, pause_at=6)
        second = start(job, lighthouse, 1, die_at=3)
        job.wait(lambda: all(child.of("ready") for child in first + second), START_TIMEOUT_S, "meshes")
        for child in first + second:
            child.send(do="train")
        for child in second:
            child.expected_to_live = False
        job.wait(lambda: any(child.returncode is not None for child in second), 60, "a group dies")
        for child in second:
            child.kill()
        again = start(job, lighthouse, 1, seed=99)
        job.wait(lambda: all(child.of("ready") for child in again), START_TIMEOUT_S, "the group is back")
        job.wait(lambda: all(child.of("paused") for child in first), 60, "the first group waits")
        for child in first + again:
            child.send(do="train")
        job.wait_exit(first + again, 90)
        weights, batches = one_process()
        for child in first + again:
            for name, value in child.of("finished")[0]["weights"].items():
                torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-9, msg=f"{child.name}: {name}")
        trained: dict[int, list[int]] = defaultdict(list)
        for child in first + second + again:
            for event in child.of("step"):
                if event["committed"]:
                    trained[event["step"]] += event["indices"]
        assert [sorted(trained[number]) for number in sorted(trained)] == batches
        assert any(event["indices"] for event in again[0].of("step")), "the group that came back trained nothing"
