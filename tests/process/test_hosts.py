"""Hosts that lose each other: no connection breaks, there is only silence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chaos import HEARTBEAT_TIMEOUT_S, Chaos
from hosts import Hosts, NoHosts
from processes import Job


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with Hosts(2) as made:
            yield made
    except NoHosts as e:
        pytest.skip(str(e))


@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_commits_nothing_and_heals_when_it_is_back(hosts: Hosts) -> None:
    """What it would have committed alone, or went on with from its own weights, the history of the job shows."""
    with Job() as job:
        chaos = Chaos(job, groups=2, hosts=hosts)
        chaos.start()
        outcome = chaos.cut(1)
        print(outcome)
        assert outcome.seconds > HEARTBEAT_TIMEOUT_S / 2, "only its silence gives it away"
        assert outcome.lost <= 1
        chaos.cut(0)  # the primary's
        chaos.finish()
