"""kill -9 of all trainers at any moment: the next ones end with the bits of an undisturbed run, in which each
sample counts once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from processes import HERE, START_TIMEOUT_S, Child, Job, free_port, ours_path
from total_loss_worker import BATCH, SAMPLES, STEPS

from tests.bounded import todays

EVERY = 2  # steps between two copies


def start(job: Job, lighthouse: str, memory: Path, groups: int, ranks: int, name: str) -> list[Child]:
    children = []
    for group in range(groups):
        env = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
            "REPLICA_GROUP_ID": str(group),
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "TORCHFT_SNAPSHOT_MEMORY": str(memory),
            "SNAPSHOTS": str(EVERY),
            "STEP_S": "0.05",
        }
        for rank in range(ranks):
            more = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            worker = Path(HERE) / "total_loss_worker.py"
            children.append(job.python(f"{name}-{group}-{rank}", worker, path=ours_path(), env=more))
    job.wait(lambda: all(child.of("ready") for child in children), START_TIMEOUT_S, "all ranks are ready")
    return children


def end(job: Job, children: list[Child]) -> str:
    """The digest of the weights with which all ranks end."""
    job.wait_exit(children, 120)
    ends = {child.of("finished")[0]["weights"] for child in children}
    assert len(ends) == 1, job.report()
    return ends.pop()


def counted(children: list[Child]) -> Iterator[tuple[int, Counter[int]]]:
    """The samples of each step that some rank committed."""
    steps: dict[int, Counter[int]] = {}
    for child in children:
        for event in child.of("step"):
            steps.setdefault(event["step"], Counter()).update(event["counted"])
    yield from sorted(steps.items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("groups", "ranks", "kills"),
    # The slow one is the same with shards.
    [(2, 1, 1), pytest.param(3, 2, 3, marks=pytest.mark.slow)],
)
def test_everything_is_killed(groups: int, ranks: int, kills: int, tmp_path: Path) -> None:
    draw = random.Random(todays(46))
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=1, join_timeout_ms=60000)
        undisturbed = end(job, start(job, lighthouse, tmp_path / "other", 1, ranks, "undisturbed"))

        reached, lives = 0, []
        for kill in range(kills):
            children = start(job, lighthouse, tmp_path / "memory", groups, ranks, f"life{kill}")
            until = draw.randint(reached + 3, reached + (STEPS - reached) // 2)
            first = children[0]
            job.wait(lambda: any(e["step"] >= until for e in first.of("step")), 60, "a step")  # noqa: B023
            for child in draw.sample(children, len(children)):
                child.expected_to_live = False
            for child in draw.sample(children, len(children)):
                child.kill()
            lives.append(dict(counted(children)))
            reached = max(lives[-1])
        children = start(job, lighthouse, tmp_path / "memory", groups, ranks, "last")
        assert end(job, children) == undisturbed, job.report()
        lives.append(dict(counted(children)))
        for before, after in pairwise(lives):
            # the step of the copy, the one that was being copied, and the one in progress
            assert max(before) - 2 * EVERY <= min(after) <= max(before) + 1, job.report()
        total: dict[int, Counter[int]] = {}
        for life in lives:
            total.update(life)  # a step that was made again replaces the one that was lost
        assert sorted(total) == list(range(STEPS))
        complete = [step for step in total if step in lives[-1]]
        assert all(sum(total[step].values()) == BATCH and max(total[step].values()) == 1 for step in complete)
        epoch = Counter(sample for step in complete[-SAMPLES // BATCH :] for sample in total[step])
        assert len(complete) < SAMPLES // BATCH or epoch == Counter(range(SAMPLES))
    left = [path for path in (tmp_path / "memory").iterdir() if path.is_dir()]
    assert left == [], "a job that has ended leaves no copies"
