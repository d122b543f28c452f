"""Hosts that lose contact while their connections stay open, so that only silence shows it; and distant
hosts.
"""

from __future__ import annotations

import pytest
from chaos import HEARTBEAT_TIMEOUT_MS, Chaos
from hosts import Hosts
from processes import Job

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


# Each process imports PyTorch, because none is forked in the namespace of a host. test_chaos.py stops
# processes, which only silence shows too, and go/sim cuts machines off.
@pytest.mark.slow
def test_a_host_that_is_cut_off_commits_nothing_and_heals_afterwards() -> None:
    """The check of the job's history would find commits that it makes alone, or steps from its outdated
    weights.
    """
    with Hosts(2) as hosts, Job() as job:
        chaos = Chaos(job, groups=2, hosts=hosts)
        chaos.start()
        outcome = chaos.cut(1)
        print(outcome)
        assert outcome.seconds > HEARTBEAT_TIMEOUT_MS / 1000 / 2, "only its silence shows the failure"
        assert outcome.lost <= 1
        chaos.cut(0)  # the primary's host
        chaos.finish()


@pytest.mark.slow  # go/manager's TestAnyHostOfAGroupThatVanishesIsNoticed, in memory
def test_the_host_of_another_rank_is_cut_off() -> None:
    """Rank 1 sends no heartbeats: the pings of its group's manager server notice that its host is silent. The
    job's heartbeat timeout is so long that nothing else does.
    """
    with Hosts(4) as hosts, Job() as job:
        chaos = Chaos(
            job, groups=2, ranks=2, hosts=hosts, lighthouse_options=["--heartbeat_timeout_ms=60000"]
        )
        chaos.start()
        outcome = chaos.cut(1, rank=1, bound_s=20.0)
        print(outcome)
        assert outcome.lost <= 1
        chaos.finish()


@pytest.mark.slow  # the test above has hosts; go/sim has late and lost messages
def test_hosts_that_are_far_away() -> None:
    """20 ms in each direction, and 1 % loss: no member fails because of that, and a failure is detected."""
    with Hosts(2, delay_s=0.02, loss=0.01) as hosts, Job() as job:
        # Frames pass through this process, which a busy machine may delay, so silence does not count here.
        chaos = Chaos(job, groups=2, hosts=hosts, lighthouse_options=["--heartbeat_timeout_ms=60000"])
        chaos.start()
        (quorum,) = {e["quorum"] for life in chaos.lives for e in chaos._steps(life)[-1:]}
        for _ in range(10):
            chaos.wait_together()
        steps = [e for life in chaos.lives for e in chaos._steps(life) if e["quorum"] >= quorum]
        assert {e["quorum"] for e in steps} == {quorum}, "a healthy member counted as failed"
        assert all(e["committed"] for e in steps)
        outcome = chaos.kill(1, phase="in bucket 1")
        print(outcome)
        assert outcome.lost <= 1
        chaos.finish()
        assert hosts.links is not None
        print(f"{hosts.links.carried} frames carried, {hosts.links.lost} lost")
        assert hosts.links.lost > 0
