"""Jobs on Slurm by the scripts in python/examples/slurm and by the page for users."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from documents import ROOT, blocks
from jobs import ENDLESS, RANK, STEPS, Job
from machines import wait_for

# test_slurm_example.py has the scripts with stand-ins for Slurm's commands.
pytestmark = [pytest.mark.slurm, pytest.mark.slow(minutes=15), pytest.mark.timeout(1200)]


def test_jobs_of_one_user_do_not_meet(new_job: Callable[[], Job]) -> None:
    """Points 3 and 4: in one folder, with the address of an ended job in it, and both at once."""
    first, second = new_job(), new_job()
    stale = first.logs / "1" / "lighthouse"
    stale.parent.mkdir()
    stale.write_text("http://node4:1\n")
    for job in (first, second):
        job.start_lighthouse("--nodelist=node1")
        job.start_groups("0", STEPS, ENDLESS)
    took = max(job.wait_for_steps(0, groups=1) for job in (first, second))
    first.seconds("until the first steps, beside the address of an ended job", took)
    for job in (first, second):
        assert {groups for _, groups in job.steps(0)} == {1}, "the groups of two jobs train together"
        job.cluster.slurm("scancel", job.id)
        wait_for("its address is gone", lambda job=job: not (job.logs / job.id / "lighthouse").exists(), 60.0)
        assert (job.logs / job.id / "state").is_dir()


def test_the_rank_that_fails_first_decides(job: Job) -> None:
    """srun ends the others then, and ends with the highest status. /bin/bash needs no start of PyTorch."""
    (job.logs / "none").mkdir()
    (job.logs / "none" / "lighthouse").write_text("http://node4:1\n")
    job.id = "none"
    script = job.folder / "rank"
    script.write_text("#!/bin/bash\n[ $RANK = 2 ] || exec sleep 600\nexit $((TORCHFT_RETURNS ? 65 : 1))\n")
    script.chmod(0o755)
    job.start_groups("0", str(script), options=("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"))
    took = job.wait_for_state(job.groups[0], "FAILED")
    job.seconds("until two starts of 4 ranks have failed", took)
    assert re.findall(r"ended with status (\d+)", job.output(0)) == ["1", "65"]
    assert not list((job.logs / "none").glob("ends-*"))


def test_a_script_that_fails_behind_its_loop_fails_its_element(job: Job) -> None:
    """As `torchft run` shows it: the group comes back late in its second start."""
    job.start_lighthouse(min_replicas=2)  # neither is done before the other has begun
    job.start_groups("0-1", STEPS, "40", "1")
    job.wait_for_state(job.groups[0], "COMPLETED")
    took = job.wait_for_state(job.groups[1], "FAILED")
    job.seconds("until the element has failed", took)
    shown = job.cluster.slurm("scontrol", "show", "job", job.groups[1])
    assert "ExitCode=1:0" in shown
    assert re.findall(r"ended with status (\d+)", job.output(1)) == ["1", "66"]
    job.start_groups("0", STEPS, "40")  # a late return without a failure: its training is complete
    job.wait_for_state(job.groups[0], "COMPLETED")


def test_a_regression_is_an_event(job: Job) -> None:
    """All groups end, with nothing left of their state."""
    job.start_lighthouse()
    for _ in range(2):
        job.start_groups("0", STEPS, ENDLESS, TORCHFT_SNAPSHOTS="0", MAX_RESTARTS="0", MAX_REQUEUES="0")
        job.wait_for_steps(0)
        job.node(job.groups[0]).kill(RANK)
        job.wait_for_state(job.groups[0], "FAILED")
    assert len([event for event in job.events() if event["kind"] == "regressed"]) == 1
    assert "regressed the job had reached step" in job.torchft("events")


def test_a_group_of_two_nodes_with_two_gpus_each(job: Job) -> None:
    job.start_lighthouse()
    options = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
    job.start_groups("0", STEPS, "20", options=options)
    took = job.wait_for_state(job.groups[0], "COMPLETED")
    job.seconds("until 20 steps of 4 ranks on 2 nodes are complete", took)
    ranks = {int(rank) for rank in re.findall(r"rank (\d) ended", job.output(0))}
    assert ranks == {0, 1, 2, 3}


def test_the_page_is_followed_to_a_healed_group(job: Job) -> None:
    """The commands of docs/deploy.md, in a clone's folder."""
    for name in ("python", "train_ddp.py"):
        (job.folder / name).symlink_to(ROOT / name)
    page = blocks("docs/deploy.md", (ROOT / "docs" / "deploy.md").read_text())
    start, look = (
        block.text for block in page if block.heading == "Slurm" and "LIGHTHOUSE_JOB" in block.text
    )
    began = time.monotonic()
    job.adopt(job.shell(start + "\necho $LIGHTHOUSE_JOB"), groups=3)
    job.wait_for_steps(0, count=1, groups=3)
    job.seconds("from nothing to three groups that train", time.monotonic() - began)
    job.node(job.groups[1]).kill(RANK)
    job.wait_for_steps(0, count=1, groups=2)
    job.seconds("from the kill of a group to healed", job.wait_for_steps(0, count=1, groups=3))
    shown = job.shell(f"LIGHTHOUSE_JOB={job.id}\n{look}")
    assert "3 groups train from step" in shown and "took over" in shown
