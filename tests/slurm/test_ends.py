"""A job that trains in Slurm, while its lighthouse, its groups or their nodes end, in each possible way.

The tests play one after the other on one job, so that PyTorch's start is waited for once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from jobs import ENDLESS, RANK, START_S, STEPS, Job
from machines import Cluster, wait_for

# test_slurm_example.py has the scripts with stand-ins for Slurm's commands.
pytestmark = [pytest.mark.slurm, pytest.mark.slow(minutes=15), pytest.mark.timeout(1200)]
# Slurm starts a requeued job when the credentials of its former life have expired, after two minutes.
REQUEUED_S = 300.0


@pytest.fixture(scope="module")
def endless(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job of two groups, each on a node, that trains until the last test."""
    job = Job(cluster, tmp_path_factory.mktemp("endless"))
    try:
        job.start_lighthouse()
        job.start_groups("0-1", STEPS, ENDLESS)
        job.wait_for_steps(0, groups=2)
        yield job
        made = [step for step, _ in job.steps(0)]
        assert made == sorted(set(made)), "group 0 made a step twice, or went back"
    finally:
        job.close()


def test_a_killed_lighthouse_is_started_again(endless: Job) -> None:
    """Point 5."""
    node = endless.node(endless.id)
    before = node.pids("^torchft_lighthouse|/torchft_lighthouse")
    node.kill("/torchft_lighthouse")
    took = wait_for("another one runs", lambda: set(node.pids("/torchft_lighthouse")) - set(before))
    endless.wait_for_steps(0, groups=2)
    endless.seconds("from kill -9 of the lighthouse to the next one", took)
    assert endless.state(endless.id) == "RUNNING"


def test_a_lighthouse_on_another_node_is_found(endless: Job) -> None:
    """Points 1 and 2. The groups train on meanwhile, and the one that fails waits for it."""
    cluster, node = endless.cluster, endless.node(endless.id).name
    cluster.slurm("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    cluster.slurm("scontrol", "requeue", endless.id)
    endless.node(endless.groups[1]).kill(RANK)
    took = endless.wait_for_state(endless.id, "RUNNING", REQUEUED_S)
    assert endless.node(endless.id).name != node
    took += endless.wait_for_steps(0, groups=2, seconds=START_S)
    cluster.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    endless.seconds("from the requeue of the lighthouse to a healed group", took)
    assert "regressed" not in {event["kind"] for event in endless.events()}


def test_a_group_whose_node_fails_heals_on_another_one(endless: Job) -> None:
    node = endless.node(endless.groups[1]).name
    if node == endless.node(endless.id).name:
        pytest.fail("the lighthouse runs on the group's node")
    endless.cluster.fail(node)
    took = wait_for(
        "Slurm has put it into the queue", lambda: endless.state(endless.groups[1]) != "RUNNING", 120.0
    )
    took += endless.wait_for_state(endless.groups[1], "RUNNING", REQUEUED_S)
    took += endless.wait_for_steps(0, groups=2)
    endless.cluster.boot(node)
    endless.seconds("from the failure of a group's node to healed", took)


def test_a_group_whose_restarts_are_used_up_is_requeued(endless: Job) -> None:
    """Point 5. /bin/false needs no start of PyTorch."""
    endless.start_groups("2", "/bin/false", MAX_RESTARTS="1", MAX_REQUEUES="1")
    took = wait_for(
        "it is put into the queue", lambda: "BeginTime" in endless.cluster.jobs()[endless.groups[2]]
    )
    took = endless.wait_for_state(endless.groups[2], "FAILED", REQUEUED_S)
    endless.seconds("until a requeued group has failed again, for good", took)
    assert endless.output(2).count("ended with status 1") == 4


def test_another_submission_brings_a_group_back_which_leaves_before_its_time_limit(endless: Job) -> None:
    """Points 5 and 6: its first element, of the test before, has failed for good. The signal comes one to two
    minutes before the limit.
    """
    options = ("--time=30", "--cpus-per-task=2")
    endless.start_groups("2", STEPS, ENDLESS, options=options, NUM_REPLICA_GROUPS="3")
    endless.seconds("from sbatch --array=2 to healed", endless.wait_for_steps(0, groups=3))
    endless.cluster.slurm("scontrol", "update", f"JobId={endless.groups[2]}", "EndTime=now+100")
    took = endless.wait_for_state(endless.groups[2], "COMPLETED")
    endless.seconds("from 100 s before its time limit to the end of the drained group", took)
    endless.wait_for_steps(0, groups=2)
    assert re.findall(r"ended with status (\d+)", endless.output(2)) == ["0"]
