"""Groups of two ranks under torchrun, one of which is preempted: all its ranks leave, and no step is lost."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ours_path
from test_torchft_run import Command

from torchft.coordination import LighthouseServer
from torchft.launch import process_tree
from torchft.launch.group import ReplicaGroup

SCRIPT = Path(__file__).resolve().parent / "preempted_job.py"
RANKS, BATCH = 2, 12
Event = dict[str, Any]

# tests/integration/test_leave_on.py has the same with threads.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Job:
    """The groups, and the events of their ranks."""

    def __init__(self, folder: Path, lighthouse: str, groups: int, **env: str) -> None:
        self.events = folder / "events"
        self.events.mkdir()
        self.lighthouse = lighthouse
        self.groups = [
            ReplicaGroup(i, groups, [str(SCRIPT)], folder / f"group-{i}.log", RANKS) for i in range(groups)
        ]
        for group in self.groups:
            group.start(lighthouse, {"EVENTS": str(self.events), "PYTHONPATH": str(ours_path()), **env})

    def of(self, group: int, rank: int) -> list[Event]:
        path = self.events / f"{group}-{rank}.jsonl"
        if not path.exists():
            return []
        return [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]

    def wait(self, until: Callable[[], object], what: str, *alive: int, seconds: float = 60.0) -> None:
        """Returns when the condition is true. None of these groups may end before."""
        deadline = time.monotonic() + seconds
        while not until():
            logs = "\n".join(f"{group.log}:\n{group.log.read_text()[-3000:]}" for group in self.groups)
            assert all(self.groups[i].status is None for i in alive), f"a group ended before: {what}\n{logs}"
            assert time.monotonic() < deadline, f"{seconds:g} s passed before: {what}\n{logs}"
            time.sleep(0.05)

    def step(self, group: int) -> int:
        return max((event["step"] for rank in range(RANKS) for event in self.of(group, rank)), default=0)

    def all_train(self, steps: int) -> Callable[[], bool]:
        """Returns a condition: all groups have done this number of steps."""
        return lambda: all(self.step(i) >= steps for i in range(len(self.groups)))

    def failed(self) -> list[Event]:
        with urllib.request.urlopen(f"{self.lighthouse}/api/v1/history", timeout=10) as answer:
            return [event for event in json.load(answer)["events"] if event["kind"] == "failed"]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000)
    yield server.address()
    server.shutdown()


def check_that_nothing_is_lost(events: list[list[Event]], until: int) -> None:
    """Checks that each sample of each batch up to a step was counted by exactly one rank."""
    counted: dict[tuple[int, int], Counter[int]] = {}
    for rank in events:
        assert not [event for event in rank if event["event"] == "lost"]
        for event in rank:
            if event["event"] == "commit" and event["step"] <= until:
                counted.setdefault(tuple(event["batch"]), Counter()).update(event["counted"])
    assert len(counted) == until
    assert all(len(samples) == BATCH and set(samples.values()) == {1} for samples in counted.values()), (
        counted
    )


@pytest.mark.parametrize("signaled", ["rank 0", "rank 1", "torchrun"])
def test_a_preempted_group_leaves(lighthouse: str, tmp_path: Path, signaled: str) -> None:
    job = Job(tmp_path, lighthouse, 3)
    try:
        job.wait(job.all_train(10), "all train", 0, 1, 2, seconds=200)
        pid = job.groups[1].pid if signaled == "torchrun" else job.of(1, int(signaled[-1]))[0]["pid"]
        os.kill(pid, signal.SIGTERM)
        job.wait(lambda: job.groups[1].status is not None, "it leaves", 0, 2)
        # torchrun exits with 1 if it got a signal itself, with any status of its workers.
        assert job.groups[1].status == (1 if signaled == "torchrun" else 0), job.groups[1].log.read_text()
        ends = [job.of(1, rank)[-1] for rank in range(RANKS)]
        assert [end["event"] for end in ends] == ["left"] * RANKS, job.groups[1].log.read_text()
        assert len({end["step"] for end in ends}) == 1 and all(end["draining"] for end in ends)
        last = ends[0]["step"]
        job.wait(lambda: all(job.step(i) >= last + 10 for i in (0, 2)), "the others continue", 0, 2)
        assert job.failed() == []
        check_that_nothing_is_lost(
            [job.of(i, rank) for i in range(3) for rank in range(RANKS)], until=last + 5
        )
    finally:
        for group in job.groups:
            group.kill()


def test_a_hanging_process_ends_after_the_grace_period(lighthouse: str, tmp_path: Path) -> None:
    job = Job(tmp_path, lighthouse, 1, HANG_AT="10", TORCHFT_GRACE_S="2")
    (group,) = job.groups
    try:
        job.wait(lambda: job.of(0, 1) and job.of(0, 1)[-1]["event"] == "hangs", "it hangs", 0, seconds=200)
        group.terminate()
        job.wait(lambda: group.status is not None, "it ends")
    finally:
        group.kill()
    output = group.log.read_text()
    assert (
        "SIGTERM: the grace period of TORCHFT_GRACE_S=2 s is over: the process ends now, with status 143"
        in output
    )
    assert "preempted_job.py" in output[output.index("with status 143") :], "where it hangs"
    assert "forcefully exiting via" not in output, "torchrun had to kill it"
    assert job.of(0, 1)[-1]["event"] == "hangs"


def test_torchft_run_drains_all_groups(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    os.environ["EVENTS"] = str(events)
    try:
        run = Command(tmp_path, "--replicas", "2", "--nproc-per-node", str(RANKS), str(SCRIPT))
    finally:
        del os.environ["EVENTS"]

    def of() -> list[list[Event]]:
        return [
            [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(events.iterdir())
        ]

    def steps() -> list[int]:
        return [path.read_text().count("commit") for path in events.iterdir()]

    try:
        run.wait(lambda: len(steps()) == 2 * RANKS and min(steps()) >= 10, "all train", 200)
        run.process.send_signal(signal.SIGTERM)
        assert run.process.wait(60) == 128 + signal.SIGTERM, run.report()
    finally:
        process_tree.kill_tree(run.process)
    assert [rank[-1]["event"] for rank in of()] == ["left"] * 2 * RANKS, run.report()
    assert [event for rank in of() for event in rank if event["event"] == "lost"] == []
