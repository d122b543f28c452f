"""A group that joins a job with a larger model is refused by name, and costs the other groups nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mixed import PHASE_TIMEOUT_S, Group
from processes import START_TIMEOUT_S, Child, Job, ours_path

STEPS = 10


@pytest.fixture
def job() -> Iterator[Job]:
    with Job() as job:
        yield job


class Trains:
    """Two groups that train together, and one whose model is larger."""

    def __init__(self, job: Job, *options: str) -> None:
        self.job = job
        ours = ours_path()
        self.healthy = [Group(job, number, ours, options) for number in range(2)]
        self.larger = Group(job, 2, ours, (*options, "--width=64"))
        _, self.lighthouse = job.lighthouse(
            ours, min_replicas=2, join_timeout_ms=30_000, heartbeat_timeout_ms=10_000
        )
        job.wait(
            lambda: all(child.events for child in job.children), START_TIMEOUT_S, "all have imported torch"
        )
        for group in self.healthy:
            group.join(self.lighthouse)
        for group in self.healthy:
            group.child.send(do="train")
        self.wait_steps()

    def wait_steps(self) -> None:
        """Waits until the healthy groups have trained some more steps together."""
        after = self.healthy[0].last_step()
        self.job.wait(
            lambda: all(len(group.committed(2, after)) >= STEPS for group in self.healthy),
            PHASE_TIMEOUT_S,
            "the healthy groups train on",
        )

    def join(self) -> Child:
        """Lets the larger one join, and waits for its end."""
        child = self.larger.child
        self.larger.join(self.lighthouse)
        child.expected_to_live = False
        child.send(do="train")
        self.job.wait(lambda: child.returncode is not None, PHASE_TIMEOUT_S, "the larger one ends")
        return child

    def finish(self) -> None:
        last = max(group.last_step() for group in self.healthy) + STEPS
        for group in self.healthy:
            group.child.send(do="finish", step=last)
        self.job.wait_exit([group.child for group in self.healthy], PHASE_TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_is_refused_by_name_and_no_step_is_lost(job: Job) -> None:
    trains = Trains(job)
    larger = trains.join()
    assert larger.returncode == 1 and not larger.of("step")
    error = next(line for line in larger.log().splitlines() if re.match(r"torchft\.\S+\.LayoutDiffers", line))
    assert "member worker_2:" in error and "reduces other tensors than member worker_" in error
    assert "rank 0 has 4 tensors of 836 elements" in error and "has 4 tensors of 212 elements" in error
    assert "here parameter: optimizer's [0][0] float32[64, 8]" in error
    assert "there parameter: optimizer's [0][0] float32[16, 8]" in error
    trains.wait_steps()
    trains.finish()
    for group in trains.healthy:
        steps = [event["step"] for event in group.child.of("step") if event["committed"]]
        assert all(event["committed"] for event in group.child.of("step"))
        assert steps == [*range(1, len(steps) + 1)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_a_wrapper_it_ends_no_other_process(job: Job) -> None:
    trains = Trains(job, "--undeclared")
    larger = trains.join()
    assert larger.returncode == 1
    assert (
        "call 0 of the step differs: allreduce of 512 x float32 (AVG) here, allreduce of 128 x "
        "float32" in larger.log()
    )
    trains.wait_steps()
    trains.finish()
    for group in trains.healthy:
        assert sum(not event["committed"] for event in group.child.of("step")) <= 1
