"""torchtitan's own fault-tolerance code with this package: its manager, hooks, optimizers, checkpoints."""

from __future__ import annotations

import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from causes import SILENCE_MS
from hsdp_job import committed, weights
from processes import HERE, START_TIMEOUT_S, Child, Job, free_port, ours_path
from upstream import client_path

from tests.bounded import todays

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="torchtitan needs Python 3.11"),
    pytest.mark.timeout(300),
]


def start(
    job: Job, lighthouse: str, group: int, folder: Path, ranks: int = 1, **options: object
) -> list[Child]:
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
        job.wait(
            lambda: [e for e in committed(first[0]) if e["participants"] == 1], 60, "a step of one group"
        )
        again = start(job, lighthouse, 1, tmp_path, seed=99)
        ready(job, again)
        job.wait(lambda: len(both(again[0])) >= 2, 60, "the restarted group participates")
        last = committed(first[0])[-1]["step"] + 10
        for child in first + again:
            child.send(do="finish", step=last)
        end = weights(job, first + again)  # equal in all groups
        assert any(e["total"] == 2 for e in both(first[0]))
        # Its position in the data was restored from its own folder.
        assert again[0].of("ready")[0]["place"] > 0

        # A new job starts from the checkpoint on disk. torch.distributed.checkpoint wrote a full one every 5
        # steps.
        folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert "ft-replicat-0" in folders and "ft-replicat-1" in folders
        saved = max(int(name.removeprefix("step-")) for name in folders if name.startswith("step-"))
        assert saved == first[0].of("finished")[0]["trained"] // 5 * 5
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


@dataclass
class Killed:
    """A job of two groups of two ranks whose processes are killed, and the groups started again."""

    job: Job
    lighthouse: str
    folder: Path
    rng: random.Random
    groups: list[list[Child]] = field(default_factory=list)
    spares: list[list[Child]] = field(default_factory=list)

    def begin(self) -> None:
        self.spares = [self._spare(group) for group in range(2)]
        self.groups = [self._next(group) for group in range(2)]
        for group in self.groups:
            ready(self.job, group)
        self.wait_together()

    def _spare(self, group: int) -> list[Child]:
        """Starts the processes of a group, which import torch, and wait until the group in use has failed."""
        seed = self.rng.randrange(1000)  # weights of its own: what it does not take over is seen
        return start(self.job, self.lighthouse, group, self.folder, ranks=2, seed=seed, spare=1)

    def _next(self, group: int) -> list[Child]:
        children = self.spares[group]
        self.job.wait(
            lambda: all(c.of("imported") for c in children), START_TIMEOUT_S, "the spares have imported"
        )
        for child in children:
            child.send(do="start")
        self.spares[group] = self._spare(group)
        return children

    def kill(self, group: int) -> None:
        """Kills a rank of a group or all of them, as torchrun ends the others, and starts the group again."""
        first = self.rng.randrange(2)
        delay = self.rng.choice((0.0, self.rng.uniform(0, 0.3)))
        children = self.groups[group]
        print(f"kill of group {group}, rank {first} first, the other after {delay:.3f} s", flush=True)
        for child in children:
            child.expected_to_live = False
        children[first].kill()
        time.sleep(delay)
        children[1 - first].kill()
        self.groups[group] = self._next(group)

    def train(self, group: int) -> None:
        ready(self.job, self.groups[group])

    def wait_together(self) -> None:
        """Waits for a step that both groups count, and compares the weights of all such steps."""
        self.job.wait(lambda: self._common(), 60, "a step that both groups count")
        check_equal(self.job, [child for group in self.groups for child in group])

    def _common(self) -> set[tuple[int, int]]:
        counted = [
            {(e["quorum"], e["step"]) for e in committed(child) if e["participants"] == 2}
            for group in self.groups
            for child in group
        ]
        return set.intersection(*counted)


def check_equal(job: Job, children: list[Child]) -> int:
    """Checks that the weights and Adam's state are equal after each step that two groups committed in one
    quorum.

    Returns:
        the number of these steps, of each rank.
    """
    found: dict[tuple[int, int, str], dict[str, str]] = defaultdict(dict)
    for child in children:
        group, rank = child.name.split("-")
        for e in committed(child):
            found[e["quorum"], e["step"], rank][group] = e["digest"]
    both = {key: digests for key, digests in found.items() if len(digests) == 2}
    differ = {key: digests for key, digests in both.items() if len(set(digests.values())) > 1}
    assert not differ, f"{differ}\n{job.report()}"
    return len(both)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(10, marks=[pytest.mark.slow(minutes=4), pytest.mark.timeout(600)]),
        pytest.param(100, marks=[pytest.mark.slow(minutes=30), pytest.mark.timeout(2700)]),
    ],
)
def test_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    """No other process ends, no step waits for long, and weights are equal from the first step that
    counts.
    """
    seed = todays(43)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=SILENCE_MS
        )
        killed = Killed(job, lighthouse, tmp_path, rng)
        killed.begin()
        done = 0
        while done < kills:
            time.sleep(rng.uniform(0, 0.5))
            failed = rng.randrange(2)
            killed.kill(failed)
            done += 1
            starting = {failed}
            if done < kills and rng.random() < 0.5:  # another one before that group takes part again
                if rng.random() < 0.5:
                    killed.train(failed)
                    starting.remove(failed)
                time.sleep(rng.uniform(0, 1))
                second = rng.randrange(2)
                killed.kill(second)
                done += 1
                starting.add(second)
            for group in starting:
                killed.train(group)
            killed.wait_together()
            print(f"{done} of {kills} kills, step {committed(killed.groups[0][0])[-1]['step']}", flush=True)
        trainers = [child for group in killed.groups for child in group]
        last = max(committed(child)[-1]["step"] for child in trainers) + 5
        for child in trainers:
            child.send(do="finish", step=last)
        weights(job, trainers)
        assert check_equal(job, job.children[1:]) >= 2 * kills / 2
