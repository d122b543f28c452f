"""kill -9 of all trainers at any moment: the next ones end with the bits of an undisturbed run, in which each
sample counts once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Optional

import pytest
from processes import HERE, START_TIMEOUT_S, Child, Job, free_port, ours_path
from total_loss_worker import BATCH, SAMPLES

from tests.bounded import todays
from torchft._lighthouse_http import HttpLighthouse
from torchft.checkpointing.snapshots import slots
from torchft.launch.lighthouse import lighthouses

EVERY = 2  # steps between two copies
EPOCH = SAMPLES // BATCH  # steps


def start(
    job: Job,
    lighthouse: str,
    memory: Path,
    groups: int,
    ranks: int,
    epochs: int,
    name: str,
    hosts: bool = False,
    disks: Optional[Path] = None,
    only: Sequence[int] = (),
    named: bool = False,
    **more: str,
) -> list[Child]:
    """Starts the ranks of all groups. ``hosts``: each group is on a host of its own; ``disks``: a folder that
    has the disks of these hosts; ``only``: some groups alone; ``named``: each host has a name of its own.
    """
    children = []
    for group in only or range(groups):
        env = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
            "REPLICA_GROUP_ID": str(group),
            "TORCHFT_LIGHTHOUSE": lighthouse,
            "TORCHFT_SNAPSHOT_MEMORY": str(memory / f"host{group}" if hosts else memory),
            **({"CHECKPOINTS": str(disks / f"disk{group}")} if disks else {}),
            "SNAPSHOTS": str(EVERY),
            "STEP_S": "0.05",
            "EPOCHS": str(epochs),
            **more,
        }
        for rank in range(ranks):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            worker, title = Path(HERE) / "total_loss_worker.py", f"{name}-{group}-{rank}"
            if named:
                command = ["unshare", "--uts", "sh", "-c", f'hostname host{group} && exec "$@"', "sh"]
                command += [sys.executable, str(worker)]
                children.append(job.start(title, command, path=ours_path(), env=own))
            else:
                children.append(job.python(title, worker, path=ours_path(), env=own))
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


@pytest.mark.parametrize(
    ("groups", "ranks", "kills"),
    # The slow ones are the same with shards.
    [
        pytest.param(2, 1, 1, marks=pytest.mark.timeout(300)),
        pytest.param(3, 2, 3, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(3, 2, 20, marks=[pytest.mark.slow(minutes=20), pytest.mark.timeout(1800)]),
    ],
)
def test_everything_is_killed(groups: int, ranks: int, kills: int, tmp_path: Path) -> None:
    draw = random.Random(todays(46))
    epochs = 2 if kills < 10 else kills
    steps = epochs * EPOCH
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=1, join_timeout_ms=60000)
        undisturbed = end(job, start(job, lighthouse, tmp_path / "other", 1, ranks, epochs, "undisturbed"))

        reached, lives = 0, []
        for kill in range(kills):
            children = start(job, lighthouse, tmp_path / "memory", groups, ranks, epochs, f"life{kill}")
            until = draw.randint(reached + 3, reached + max(3, (steps - reached) // (2 + kills - kill)))
            first = children[0]
            job.wait(lambda: any(e["step"] >= until for e in first.of("step")), 60, "a step")  # noqa: B023
            for child in draw.sample(children, len(children)):
                child.expected_to_live = False
            for child in draw.sample(children, len(children)):
                child.kill()
            lives.append(dict(counted(children)))
            reached = max(lives[-1])
        children = start(job, lighthouse, tmp_path / "memory", groups, ranks, epochs, "last")
        assert end(job, children) == undisturbed, job.report()
        lives.append(dict(counted(children)))
        for before, after in pairwise(lives):
            # the step of the copy, the one that was being copied, and the one in progress
            assert max(before) - 2 * EVERY <= min(after) <= max(before) + 1, job.report()
        total: dict[int, Counter[int]] = {}
        for life in lives:
            total.update(life)  # a step that was made again replaces the one that was lost
        assert sorted(total) == list(range(steps))
        # A rank may have been killed before it told of the last step of its life.
        told = total.keys() - {max(life) for life in lives[:-1]}
        assert {step: sum(total[step].values()) for step in told} == dict.fromkeys(told, BATCH)
        for first in range(0, steps, EPOCH):
            epoch = sum((total[step] for step in range(first, first + EPOCH)), Counter[int]())
            whole = told.issuperset(range(first, first + EPOCH))
            assert epoch == Counter(range(SAMPLES)) if whole else max(epoch.values()) == 1
    left = [path for path in (tmp_path / "memory").iterdir() if path.is_dir()]
    assert left == [], "a job that has ended leaves no copies"


@pytest.mark.slow  # test_reading.py and test_making_copies.py have it without processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", [str(EVERY), "auto"])
def test_a_host_is_lost_where_each_has_a_part(tmp_path: Path, every: str) -> None:
    """Each part of the state is in the memory of two of three hosts."""
    wide = {"WIDTH": "4096", "TORCHFT_SNAPSHOT_COPIES": "2", "SNAPSHOTS": every}
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=1, join_timeout_ms=60000)
        undisturbed = end(job, start(job, lighthouse, tmp_path / "other", 1, 1, 1, "undisturbed", **wide))
        memory = tmp_path / "memory"
        children = start(job, lighthouse, memory, 3, 1, 1, "first", hosts=True, **wide)
        # A group that began before the others has made a copy of all.
        job.wait(
            lambda: all(in_parts(memory / f"host{i}") for i in range(3)), 60, "copies in parts on all hosts"
        )
        for child in children:
            child.expected_to_live = False
        for child in children:
            child.kill()
        reached = max(step for step, _ in counted(children))
        end_keeper(memory / "host1")
        shutil.rmtree(memory / "host1")

        children = start(job, lighthouse, memory, 3, 1, 1, "last", hosts=True, **wide)
        assert end(job, children) == undisturbed, job.report()
        begun = min(step for step, _ in counted(children))
        assert (1 if every == "auto" else reached - 2 * EVERY) <= begun <= reached + 1, job.report()


def in_parts(root: Path) -> bool:
    """Whether both slots of a host have parts of a state that three groups keep."""
    shares = []
    for path in root.glob("*/*/rank-0/[01]"):
        with suppress(slots.SlotError):
            shares.append(slots.read_header(path).share)
    return len(shares) == 2 and all(share is not None and share[1:] == (3, 2) for share in shares)


def end_keeper(root: Path) -> None:
    os.kill(int((root / "keeper.lock").read_text().split()[1]), signal.SIGKILL)


@pytest.mark.hosts
@pytest.mark.slow  # ten seconds of it are the time for which the last report of a keeper counts
@pytest.mark.timeout(300)
def test_the_host_with_the_newest_copy_is_named_and_waited_for(tmp_path: Path) -> None:
    """Group 1 trains on without group 0, and is killed with the keeper of its host. Group 0 would lose these
    steps: with --forbid_regression it waits until the host is back.
    """
    options = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--forbid_regression"]
    memory, wait = tmp_path / "memory", {"TORCHFT_QUORUM_TIMEOUT_SEC": "200"}
    with lighthouses(tmp_path, options, bind="127.0.0.1:0") as (address, _), Job() as job:
        ask = HttpLighthouse(address, timeout=10.0)
        undisturbed = end(job, start(job, address, tmp_path / "other", 1, 1, 12, "undisturbed", STEP_S="0"))

        def held() -> int:
            """The newest step of which host 1 has told."""
            told = [each for each in ask.get("/api/v1/keepers")["keepers"] if each["host"] == "host1"]
            return max((slot["step"] for each in told for slot in each["snapshots"]), default=-1)

        slow = {**wait, "STEP_S": "0.2"}
        first = start(job, address, memory, 2, 1, 12, "first", hosts=True, named=True, **slow)
        job.wait(lambda: held() > 0 and first[0].of("step"), 60, "both train, and host 1 tells of a copy")
        first[0].expected_to_live = False
        first[0].kill()
        began = max(event["step"] for event in first[0].of("step"))
        # The lighthouse looks at the reports once a second: at the second one it knows the first.
        known = job.wait(lambda: held() > began + EVERY and held(), 60, "host 1 has a later copy")
        job.wait(lambda: held() > known, 60, "host 1 has one more")
        first[1].expected_to_live = False
        first[1].kill()
        end_keeper(memory / "host1")

        alone = start(job, address, memory, 2, 1, 12, "alone", hosts=True, named=True, only=[0], **wait)
        job.wait(
            lambda: (
                "forbid_regression is set: " in (why := ask.get("/status")["reason"])
                and "missing of these hosts: host1" in why
            ),
            60,
            "the missing host is named",
        )
        assert not alone[0].of("step"), job.report()
        back = start(job, address, memory, 2, 1, 12, "back", hosts=True, named=True, only=[1], **wait)
        assert end(job, [*alone, *back]) == undisturbed, job.report()
        assert min(step for step, _ in counted([*alone, *back])) >= known, job.report()


# Its parts are in tests/unit/checkpointing/snapshots/test_stored.py and test_writer.py. Here the writer waits
# half a minute before it finds that no other host writes to its folder.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_hosts_lose_their_memory_and_one_its_disk(tmp_path: Path) -> None:
    """Each host has a disk that only it sees, with its part of each checkpoint."""
    wide = {"WIDTH": "4096", "TORCHFT_SNAPSHOT_COPIES": "2"}
    epochs = 24
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=1, join_timeout_ms=60000)
        quick = {**wide, "STEP_S": "0"}
        undisturbed = end(
            job, start(job, lighthouse, tmp_path / "other", 1, 1, epochs, "undisturbed", **quick)
        )
        memory, disks = tmp_path / "memory", tmp_path / "disks"
        children = start(
            job,
            lighthouse,
            memory,
            3,
            1,
            epochs,
            "first",
            hosts=True,
            disks=disks,
            **{**wide, "STEP_S": "0.3"},
        )

        def stored() -> set[int]:
            steps = [
                {
                    int(path.name.rpartition("-")[2])
                    for path in (disks / f"disk{group}").glob("parts-of-step-*")
                }
                for group in range(3)
            ]
            return steps[0] & steps[1] & steps[2]

        job.wait(lambda: len(stored()) > 1, 200, "all hosts store their parts of two checkpoints")
        for child in children:
            child.expected_to_live = False
        for child in children:
            child.kill()
        for group in range(3):
            end_keeper(memory / f"host{group}")
        shutil.rmtree(memory)
        newest = max(stored())
        shutil.rmtree(disks / "disk1")
        children = start(job, lighthouse, memory, 3, 1, epochs, "last", hosts=True, disks=disks, **quick)
        assert end(job, children) == undisturbed, job.report()
        assert min(step for step, _ in counted(children)) == newest, job.report()
