"""A lighthouse is killed or stopped; the job continues with the restarted one, or with the others of a
cluster.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from lighthouses import HERE, cluster
from processes import Child, ours_path


@pytest.mark.slow  # go/cmd/torchft_lighthouse has both
@pytest.mark.timeout(240)
def test_a_lighthouse_is_killed_and_restarted_during_a_job(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        c.steps(20, members=2)
        for _ in range(2):
            before = len(c.members[0].of("step"))
            last = max(c.quorum_ids())
            c.lighthouses[0].kill()
            time.sleep(1)
            c.lighthouses[0] = c.start_lighthouse(0)
            took = c.steps(1)
            print(f"the job continues {took:.2f} s after the lighthouse listens again")
            c.steps(20, members=2)
            assert min(c.quorum_ids(before)) >= last, (
                "ids never fall; with the same members, a quorum keeps its id"
            )
        for member in c.members:
            ids = [e["quorum_id"] for e in member.of("step")]
            steps = [e["step"] for e in member.of("step")]
            assert ids == sorted(ids) and steps == sorted(steps)


@pytest.mark.slow  # go/cmd/torchft_lighthouse
@pytest.mark.timeout(240)
def test_a_job_trains_on_while_its_lighthouse_is_away_and_each_sample_counts_once(tmp_path: Path) -> None:
    with cluster(tmp_path, groups=0) as c:

        def start(group: int) -> Child:
            env = {"TORCHFT_LIGHTHOUSE": c.addresses[0], "REPLICA_GROUP_ID": str(group)}
            return c.job.python(f"group-{group}", HERE / "counted_script.py", path=ours_path(), env=env)

        c.members = [start(group) for group in range(2)]
        c.steps(5, members=2)
        c.lighthouses[0].kill()
        began = [len(member.of("step")) for member in c.members]
        c.steps(40)
        for member, first in zip(c.members, began, strict=True):
            steps = member.of("step")[first - 1 :]
            assert all(step["committed"] and step["members"] == 2 for step in steps)
        c.lighthouses[0] = c.start_lighthouse(0)
        c.members[1].kill()
        c.members[1] = start(1)
        c.steps(5, members=2)
        for member in c.members:
            member.send(hurry=True)
        c.job.wait_exit(c.members, 120)
        for member in c.members:
            (end,) = member.of("end")
            assert (end["step"], end["weights"]) == (800, [50 / 4] * 64)


@pytest.mark.slow  # go/manager/raft_test.go stops leaders too
@pytest.mark.timeout(240)
def test_no_step_is_lost_when_the_leader_of_three_is_stopped_and_wakes(tmp_path: Path) -> None:
    """test_torchft_run.py kills the leader."""
    with cluster(tmp_path, lighthouses=3) as c:
        c.steps(20, members=2)
        leader = c.leader_of(0)
        assert leader is not None
        others = [i for i in range(3) if i != leader]
        began = [len(member.of("step")) for member in c.members]
        os.kill(c.lighthouses[leader].pid, signal.SIGSTOP)
        print(f"the groups go on after {c.steps(3):.2f} s")
        c.steps(20, members=2)
        os.kill(c.lighthouses[leader].pid, signal.SIGCONT)
        c.wait(lambda: c.leader_of(leader) in others, "the stopped one follows another one")
        c.steps(20, members=2)
        for member, first in zip(c.members, began, strict=True):
            steps = member.of("step")[first - 1 :]
            assert all(step["committed"] and step["members"] == 2 for step in steps)
            numbers = [step["step"] for step in steps]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
