"""train_ddp.py under torchrun: two ranks per group, restarts by torchrun, SIGKILL, and checkpoints."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from causes import SILENCE_MS
from waiting import wait_for

from torchft.coordination import LighthouseServer
from torchft.data.position import DataPlan, DataPosition
from torchft.launch import process_tree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "examples"))

from accounting import samples  # noqa: E402
from replica_group import Event, Group  # noqa: E402

IMAGES = 1437
# Many, because the processes of a job share two cores, and PyTorch takes seconds to import.
ENOUGH_STEPS = ["--steps", "500"]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=SILENCE_MS
    )
    yield server.address()
    server.shutdown()


@pytest.fixture
def new_group(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    """Makes groups that are killed at the end of the test."""
    made: list[Group] = []

    def new(*args: int, **kwargs: int) -> Group:
        made.append(Group(*args, folder=tmp_path, **kwargs))
        return made[-1]

    yield new
    for group in made:
        group.kill()


def rank_events(group: Group, folder: Path, rank: int) -> list[Event]:
    lines = (folder / "events" / f"group-{group.number}-rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last_pid(events: list[Event]) -> int:
    return [event["pid"] for event in events if event["event"] == "start"][-1]


@pytest.mark.slow  # test_torchft_run kills a group of torchrun, test_hsdp a rank of two
@pytest.mark.timeout(300)
def test_torchrun_restarts_a_killed_worker_and_two_ranks_a_group_end_with_the_same_weights(
    lighthouse: str, new_group: Callable[..., Group], tmp_path: Path
) -> None:
    groups = [new_group(number, 2, nproc=2) for number in range(2)]
    for group in groups:
        group.start(lighthouse, ENOUGH_STEPS, ["--max_restarts", "1"])
    # Ten commits of each group itself: a group that starts late takes over the step of the other one.
    wait_for(
        lambda: all(group.step() >= 20 and len(group.commits()) >= 10 for group in groups),
        "both groups train",
        *groups,
    )

    # Not rank 0, which has the manager server and must not wait for its failed sibling.
    os.kill(last_pid(rank_events(groups[1], tmp_path, 1)), signal.SIGKILL)
    wait_for(lambda: all(group.status == 0 for group in groups), "both groups end", *groups, seconds=200)

    starts = [event for event in groups[1].events if event["event"] == "start"]
    assert len(starts) == 2
    assert len([event for event in groups[0].events if event["event"] == "start"]) == 1
    first_commit = next(event for event in groups[1].commits() if event["time"] > starts[1]["time"])
    assert first_commit["healing"] and first_commit["step"] > 20
    ends = [end for group in groups for end in group.ends()]
    assert [end["event"] for end in ends] == ["end"] * 4
    assert len({end["sha256"] for end in ends}) == 1
    assert len({end["step"] for end in ends}) == 1

    everybody = [event for group in groups for event in group.everything()]
    epochs = -(-500 // 23)
    assert samples(groups[0].events, everybody, IMAGES, epochs) == (epochs * IMAGES, 0, 0)


# In the test above torchrun restarts a worker; test_train_parts tests the order of the data.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_torchrun_leaves_nothing_behind_and_its_group_resumes_where_its_checkpoint_was(
    lighthouse: str, new_group: Callable[..., Group], tmp_path: Path
) -> None:
    # An epoch has 15 steps, so no checkpoint is at the end of an epoch.
    train_args = ["--batch-size", "100", "--micro-batch-size", "100"]
    train_args += ["--checkpoint-every", "20", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    group = new_group(0, 1)
    group.start(lighthouse, [*train_args, "--steps", "100000"])
    wait_for(lambda: group.step() >= 25, "25 steps", group)

    pids = process_tree.tree(group.pid)
    assert len(pids) >= 4  # the agent, the worker, two processes of its data loader
    os.kill(group.pid, signal.SIGKILL)  # only the agent is killed
    wait_for(
        lambda: group.status is not None and not process_tree.alive(pids), "all follow the agent", seconds=60
    )
    group.follow()
    first_life = group.events[1:]
    killed_at = first_life[-1]["step"]
    assert [event["step"] for event in first_life] == list(range(1, killed_at + 1))

    end_at = -(-(killed_at + 20) // 15) * 15
    group.start(lighthouse, [*train_args, "--steps", str(end_at)])
    wait_for(lambda: group.status == 0, "the end", group)
    start, *second_life, end = group.events[1 + killed_at :]
    resumed_at = start["step"]
    assert resumed_at % 20 == 0 and 0 < resumed_at <= killed_at < resumed_at + 40
    assert (start["event"], end["event"], end["step"]) == ("start", "end", end_at)
    assert [event["step"] for event in second_life] == list(range(resumed_at + 1, end_at + 1))

    # Steps after the checkpoint are repeated, and none is skipped.
    trained = [event["indices"] for event in group.everything() if event["event"] == "trained"]
    lives = trained[:resumed_at], trained[-len(second_life) :]
    assert [*lives[0], *lives[1]] == batches_in_order(end_at, batch_size=100)
    for event, again in zip(first_life[resumed_at:], second_life):
        assert (event["epoch"], event["batch"]) == (again["epoch"], again["batch"])
        assert event["loss"] == pytest.approx(again["loss"], rel=1e-3)  # the models are equal, too


def batches_in_order(count: int, batch_size: int) -> list[list[int]]:
    """The first batches of a run without failures."""
    plan, position, found = DataPlan(IMAGES, batch_size, batch_size, epochs=count), DataPosition(), []
    for _ in range(count):
        found.append(list(plan.share(position, 0, 1).units[0].indices))
        position = plan.advance(position)
    return found
