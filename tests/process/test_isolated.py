"""Isolated groups in real processes: a replica group that is killed repeatedly, and one that survives."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from causes import SILENCE_MS
from processes import HERE, START_TIMEOUT_S, Child, Event, Job, free_port, ours_path
from waiting import wait_for

from torchft.coordination import LighthouseServer
from torchft.launch import process_tree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "examples"))

from replica_group import Group  # noqa: E402

KILLS = 10
PHASE_TIMEOUT_S = 100

# In every run, test_chaos kills an isolated group, and tests/unit/process_group/isolated kills a worker.
pytestmark = pytest.mark.slow(minutes=5)


def start(job: Job, number: int, life: int) -> Child:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    args = [f"--group={number}", f"--seed={20 * number + life}", "--compute_s=0.02", "--isolated"]
    return job.python(f"group{number}", HERE / "worker.py", *args, path=ours_path(), env=env)


def committed(child: Child, participants: int, after: int = 0) -> list[Event]:
    steps = child.of("step")
    return [e for e in steps if e["committed"] and e["participants"] == participants and e["step"] > after]


@pytest.mark.timeout(900)
def test_ten_kills_in_a_row_leave_both_groups_with_the_same_weights() -> None:
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=SILENCE_MS
        )
        survivor, victim = start(job, 0, 0), start(job, 1, 0)

        def join(child: Child) -> None:
            job.wait(lambda: child.of("imported"), START_TIMEOUT_S, "it has imported torchft")
            child.send(do="join", lighthouse=lighthouse)
            child.send(do="train")

        lives = [victim]
        spare = start(job, 1, 1)
        join(survivor)
        join(victim)
        for kill in range(KILLS):
            job.wait(
                lambda v=victim: len(committed(v, 2)) >= 3, PHASE_TIMEOUT_S, f"both train, before kill {kill}"
            )
            victim.kill()
            killed_at = survivor.of("step")[-1]["step"]
            job.wait(
                lambda at=killed_at: len(committed(survivor, 1, at)) >= 2,
                PHASE_TIMEOUT_S,
                "one continues alone",
            )
            victim = spare
            lives.append(victim)
            join(victim)
            if kill < KILLS - 1:
                spare = start(job, 1, kill + 2)
        job.wait(lambda: len(committed(victim, 2)) >= 3, PHASE_TIMEOUT_S, "both train at the end")

        last = survivor.of("step")[-1]["step"] + 20
        for child in (survivor, victim):
            child.send(do="finish", step=last)
        job.wait_exit([survivor, victim], PHASE_TIMEOUT_S)
        ends = [child.of("finished")[0] for child in (survivor, victim)]
        assert [end["step"] for end in ends] == [last, last]
        assert ends[0]["digest"] == ends[1]["digest"]

        # Every incarnation took over its weights from the survivor.
        weights = {event["step"]: event["digest"] for event in committed(survivor, 2)}
        for life in lives:
            together = {
                event["step"]: event["digest"] for event in committed(life, 2) if event["step"] in weights
            }
            assert together and all(weights[step] == digest for step, digest in together.items())
        assert all(life.of("loaded") for life in lives[1:])


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=SILENCE_MS
    )
    yield server.address()
    server.shutdown()


def workers_of(group: Group) -> list[int]:
    """The workers of a trainer: grandchildren, forked by its fork server and with the server's command
    line.
    """
    found = []
    for pid in process_tree.tree(group.pid):
        with contextlib.suppress(OSError):  # the process has ended in the meantime
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            threads = len(os.listdir(f"/proc/{pid}/task"))
            if b"torchft.process_group.isolated.server" in command and threads > 1:
                found.append(pid)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kills", [3, 10])
def test_train_ddp_isolated_survives_kills_in_a_row(lighthouse: str, tmp_path: Path, kills: int) -> None:
    # The job has three groups, and its last steps wait for all. The third is started after the last kill.
    groups = [Group(number, 3, folder=tmp_path) for number in range(3)]
    survivor, victim, third = groups
    args = ["--isolated", "--steps", str(600 * kills)]
    killed: list[int] = []

    def together(group: Group) -> int:
        """The steps that this incarnation of a group has committed together with the other group, whose
        weights it took over.
        """
        return sum(
            event["time"] > group.started and event["participants"] == 2 and not event["healing"]
            for event in group.commits()
        )

    try:
        survivor.start(lighthouse, args)
        victim.start(lighthouse, args)
        for kill in range(kills):
            wait_for(lambda: together(victim) >= 5, f"both train, before kill {kill}", survivor, victim)
            killed += process_tree.tree(victim.pid)
            victim.kill()
            victim.start(lighthouse, args)
        third.start(lighthouse, args)
        wait_for(lambda: all(group.status == 0 for group in groups), "all end", *groups)
    finally:
        for group in groups:
            group.kill()
    assert [event["event"] for event in survivor.events].count("start") == 1
    assert [event["event"] for event in victim.events].count("start") == kills + 1
    ends = [end for group in groups for end in group.ends()]
    assert [end["event"] for end in ends] == ["end"] * 3
    assert len({end["sha256"] for end in ends}) == 1
    assert len({end["step"] for end in ends}) == 1
    wait_for(lambda: not process_tree.alive(killed), "nothing is left of the killed ones", seconds=60)


@pytest.mark.timeout(300)
def test_train_ddp_isolated_survives_the_kill_of_a_worker_and_of_a_group(
    lighthouse: str, tmp_path: Path
) -> None:
    groups = [Group(number, 2, folder=tmp_path) for number in range(2)]
    args = ["--isolated", "--steps", "800"]
    pids: list[int] = []
    try:
        for group in groups:
            group.start(lighthouse, args)
        wait_for(lambda: all(group.step() >= 20 for group in groups), "both groups train", *groups)

        # Only the worker is killed: its group loses a step and continues. While a group connects with new
        # peers, the previous worker still exists.
        wait_for(lambda: len(workers_of(groups[0])) == 1, "it has one worker", *groups)
        (worker,) = workers_of(groups[0])
        os.kill(worker, signal.SIGKILL)
        step = groups[0].step()
        wait_for(lambda: all(group.step() >= step + 20 for group in groups), "both continue", *groups)
        assert [event["event"] for event in groups[0].events].count("start") == 1

        pids += process_tree.tree(groups[1].pid)
        groups[1].kill()
        groups[1].start(lighthouse, args)
        wait_for(lambda: all(group.status == 0 for group in groups), "both groups end", *groups)
    finally:
        for group in groups:
            group.kill()
    ends = [end for group in groups for end in group.ends()]
    assert [end["event"] for end in ends] == ["end"] * 2
    assert len({end["sha256"] for end in ends}) == 1
    assert len({end["step"] for end in ends}) == 1
    wait_for(lambda: not process_tree.alive(pids), "nothing is left of the killed group", seconds=60)
