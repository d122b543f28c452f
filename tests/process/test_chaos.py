"""Real processes that are killed and stopped at each phase of a step: the others go on soon, and the history holds.

What holds is in chaos.py: survivors commit within a bound, equal weights at equal steps and as one process computes
them, no step committed twice or again, nothing left behind. Many faults follow one another in one job.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch.distributed as dist
from chaos import PHASES, STOP_BOUND_S, Chaos
from processes import Job

KINDS = [
    "isolated",
    pytest.param(
        "native",
        marks=[
            pytest.mark.skipif(not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs PyTorch >= 2.14"),
            pytest.mark.slow,
        ],
    ),
]


def run(job: Job, **settings: Any) -> Chaos:
    chaos = Chaos(job, **settings)
    chaos.start()
    return chaos


@pytest.mark.timeout(600)
def test_a_group_dies_or_stops_and_the_others_go_on() -> None:
    with Job() as job:
        chaos = run(job, groups=3)
        outcomes = {
            "kill in the quorum": chaos.kill(0, phase="in the quorum"),
            "kill in bucket 1": chaos.kill(1, phase="in bucket 1"),
            "kill after the vote": chaos.kill(2, phase="after the vote"),
            "stop before the quorum": chaos.stop(0, phase="before the quorum"),
            "stop in bucket 0": chaos.stop(1, phase="in bucket 0"),
            "stop after the vote": chaos.stop(2, phase="after the vote"),
        }
        chaos.stop_lighthouse(4.0)
        chaos.kill_lighthouse()
        outcomes["all but one"] = chaos.kill(0, 1, phase="in bucket 2")
        chaos.finish()
    for what, outcome in outcomes.items():
        print(f"{what}: {outcome.seconds:.3f} s, {outcome.lost} lost")
        assert outcome.lost <= 1, what


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
def test_other_process_groups(kind: str) -> None:
    with Job() as job:
        chaos = run(job, kind=kind, groups=2)
        chaos.kill(1, phase="in bucket 1")
        chaos.stop(0, phase="in bucket 0")
        chaos.finish()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_of_a_group() -> None:
    """The manager's rank, or another: its group is out either way. One that hangs is named, and put out."""
    with Job() as job:
        options = ["--stalled_after_ms=2000", "--eject_stalled_after_ms=3000"]
        chaos = run(job, groups=2, ranks=2, lighthouse_options=options)
        chaos.kill(0, phase="in bucket 1", rank=0)
        chaos.kill(1, phase="in bucket 1", rank=1)
        outcome = chaos.stop(1, phase="in bucket 1", rank=1, bound_s=STOP_BOUND_S + 3)
        assert outcome.seconds > 2.0, "its manager server is alive: only that it makes no progress gives it away"
        chaos.finish()
        log = chaos.lighthouse.log_tail(1000)
    assert "a member makes no progress" in log and "rank 1, step" in log


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gloo", *KINDS])
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_each_phase(kind: str, groups: int) -> None:
    with Job() as job:
        chaos = run(job, kind=kind, groups=groups)
        for number, phase in enumerate(PHASES):
            chaos.kill(number % groups, phase=phase)
        for number, phase in enumerate(PHASES):
            chaos.stop(number % groups, phase=phase)
        chaos.kill_while_healing(0, "target")
        chaos.kill_while_healing(1, "source")
        if groups > 2:
            chaos.kill(0, 1, phase="in bucket 1")
        if groups > 3:
            chaos.kill(*range(1, groups), phase="in bucket 2")
        chaos.kill_lighthouse()
        chaos.finish()


def test_the_signals_are_what_they_seem() -> None:
    """A strike with SIGKILL that the child survives would make all of this pass."""
    with Job() as job:
        chaos = run(job, groups=1)
        child = chaos.lives[0].ranks[0]
        chaos._strike([child], "before the vote", signal.SIGKILL)
        job.wait(lambda: child.returncode == -signal.SIGKILL, 10, "it is dead")
