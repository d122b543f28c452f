"""Hosts that lose each other: no connection breaks, there is only silence. And hosts that are far from each other."""

from __future__ import annotations

import pytest
from chaos import HEARTBEAT_TIMEOUT_MS, Chaos
from hosts import Hosts
from processes import Job

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]


def test_a_host_that_is_cut_off_commits_nothing_and_heals_when_it_is_back() -> None:
    """What it would have committed alone, or went on with from its own weights, the history of the job shows."""
    with Hosts(2) as hosts, Job() as job:
        chaos = Chaos(job, groups=2, hosts=hosts)
        chaos.start()
        outcome = chaos.cut(1)
        print(outcome)
        assert outcome.seconds > HEARTBEAT_TIMEOUT_MS / 1000 / 2, "only its silence gives it away"
        assert outcome.lost <= 1
        chaos.cut(0)  # the primary's
        chaos.finish()


@pytest.mark.slow  # the one above has hosts, and go/sim messages that are late or lost
def test_hosts_that_are_far_away() -> None:
    """20 ms each way, and one frame in a hundred is lost: nobody is taken for dead for it, and a death is noticed."""
    with Hosts(2, delay_s=0.02, loss=0.01) as hosts, Job() as job:
        # Frames go through this process, which a busy machine may hold up: no silence counts here.
        chaos = Chaos(job, groups=2, hosts=hosts, lighthouse_options=["--heartbeat_timeout_ms=60000"])
        chaos.start()
        (quorum,) = {e["quorum"] for life in chaos.lives for e in chaos._steps(life)[-1:]}
        for _ in range(10):
            chaos.wait_together()
        steps = [e for life in chaos.lives for e in chaos._steps(life) if e["quorum"] >= quorum]
        assert {e["quorum"] for e in steps} == {quorum}, "somebody was taken for dead"
        assert all(e["committed"] for e in steps)
        outcome = chaos.kill(1, phase="in bucket 1")
        print(outcome)
        assert outcome.lost <= 1
        chaos.finish()
        assert hosts.links is not None
        print(f"{hosts.links.carried} frames carried, {hosts.links.lost} lost")
        assert hosts.links.lost > 0
