"""torchtitan's own fault-tolerance code with this package: its manager, hooks, optimizers, checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from causes import SILENCE_MS
from hsdp_job import committed, weights
from processes import HERE, START_TIMEOUT_S, Child, Job, free_port, ours_path
from upstream import client_path

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11"),
    pytest.mark.timeout(300),
]


def start(job: Job, lighthouse: str, group: int, folder: Path, ranks: int = 1, **options: object) -> list[Child]:
    env = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "TORCHFT_LIGHTHOUSE": lighthouse,
        "TORCHTITAN_PATH": str(client_path("torchtitan")),
    }
    more = [f"--{name}={value}" for name, value in options.items()]
    return [
        job.python(
            f"group{group}-{rank}",
            Path(HERE) / "torchtitan_worker.py",
            f"--group={group}",
            f"--folder={folder}",
            *more,
            path=ours_path(),
            env={**env, "RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def ready(job: Job, children: list[Child]) -> None:
    job.wait(lambda: all(child.of("ready") for child in children), START_TIMEOUT_S, "the trainers are ready")
    for child in children:
        child.send(do="train")


@pytest.mark.slow  # test_hsdp kills a rank of a sharded group
def test_fsdp_survives_a_failure_and_resumes_from_checkpoints(tmp_path: Path) -> None:
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=SILENCE_MS
        )
        first, second = (start(job, lighthouse, group, tmp_path) for group in range(2))
        ready(job, first + second)
        both = lambda child: [e for e in committed(child) if e["participants"] == 2]  # noqa: E731
        job.wait(lambda: len(both(first[0])) >= 3, 60, "steps of both groups")
        own = tmp_path / "checkpoints" / "ft-replicat-1"
        job.wait(lambda: list(own.glob("step-*/.metadata")), 60, "its position in the data is saved")
        for child in second:
            child.kill()
        job.wait(lambda: [e for e in committed(first[0]) if e["participants"] == 1], 60, "a step of one group")
        again = start(job, lighthouse, 1, tmp_path, seed=99)
        ready(job, again)
        job.wait(lambda: len(both(again[0])) >= 2, 60, "the restarted group participates")
        last = committed(first[0])[-1]["step"] + 10
        for child in first + again:
            child.send(do="finish", step=last)
        end = weights(job, first + again)  # equal in all groups
        assert any(e["total"] == 2 for e in both(first[0]))
        assert again[0].of("ready")[0]["place"] > 0  # its position in the data was restored from its own folder

        # A new job starts from the checkpoint on disk. torch.distributed.checkpoint wrote a full one every 5 steps.
        folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert "ft-replicat-0" in folders and "ft-replicat-1" in folders
        saved = max(int(name.removeprefix("step-")) for name in folders if name.startswith("step-"))
        assert saved == last // 5 * 5
        alone = start(job, lighthouse, 0, tmp_path, seed=7)
        ready(job, alone)
        assert alone[0].of("ready")[0]["found"] and alone[0].of("ready")[0]["step"] == saved
    assert all(torch.isfinite(value).all() for value in end.values())


@pytest.mark.slow  # tests/integration/test_local_sgd.py covers what torchtitan calls
@pytest.mark.parametrize("method", ["local_sgd", "diloco"])
def test_semi_synchronous_training(tmp_path: Path, method: str) -> None:
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=2)
        children = [c for group in range(2) for c in start(job, lighthouse, group, tmp_path, method=method)]
        ready(job, children)
        for child in children:
            child.send(do="finish", step=4)
        weights(job, children)
        assert all(child.of("finished")[0]["step"] == 4 for child in children)
