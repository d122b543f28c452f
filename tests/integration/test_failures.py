"""A group fails while its connections to the other groups stay open, so only the lighthouse's report reaches
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.promises import KILL_S, within
from torchft._torchft import MemberFailure
from torchft.manager import Manager


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    # The heartbeat timeout is as long as the timeout of collectives: any faster detection comes from the
    # broken connection.
    with Cluster(min_replicas=1, heartbeat_timeout_ms=30_000, join_timeout_ms=10_000) as built:
        yield built


def step(manager: Manager) -> tuple[bool, int]:
    manager.start_quorum()
    manager.allreduce(torch.ones(4)).wait()
    return manager.should_commit(), manager.num_participants()


def fail_in_a_step(cluster: Cluster, survivors: int) -> list[tuple[float, bool, list[tuple[bool, int]]]]:
    """All groups commit a step, and the last group fails in the next one. Returns for each of the others the
    seconds from the failure to its vote, whether it committed that step, and its further steps.
    """
    together, failed, ended = Gate(), Gate(), Gate()

    def start(rank: Rank) -> Manager:
        manager = rank.start_manager(init_sync=False)
        cluster.wait_for_healthy(survivors + 1)
        assert step(manager) == (True, survivors + 1)
        return manager

    def victim(rank: Rank) -> None:
        manager = start(rank)
        manager.start_quorum()
        manager.wait_quorum()
        together.wait()
        assert manager._manager is not None
        # The process group's connections stay open, as if the process were stopped.
        manager._manager.shutdown()
        failed.open()
        ended.wait()

    def survivor(rank: Rank) -> tuple[float, bool, list[tuple[bool, int]]]:
        manager = start(rank)
        manager.start_quorum()
        work = manager.allreduce(torch.ones(4))  # the victim never joins this reduction
        together.open()
        failed.wait()
        began = time.monotonic()
        assert not work.wait()
        committed = manager.should_commit()
        took = time.monotonic() - began
        return took, committed, [step(manager) for _ in range(3)]

    groups = [cluster.start(survivor, group=group) for group in range(survivors)]
    cluster.start(victim, group=survivors)
    try:
        return results(*groups)
    finally:
        ended.open()


@pytest.mark.parametrize("survivors", [1, 3])
def test_survivors_of_a_silent_failure_continue_at_once(cluster: Cluster, survivors: int) -> None:
    for took, committed, after in fail_in_a_step(cluster, survivors):
        assert not committed
        assert took < within(KILL_S)
        assert after == [(True, survivors)] * 3


def test_failures_are_reported_to_subscribers_only_with_the_error_bus(cluster: Cluster) -> None:
    received: dict[int, list[MemberFailure]] = {0: [], 1: []}
    ready, ended = Gate(), Gate()

    def listen(rank: Rank) -> None:
        manager = rank.start_manager(init_sync=False, enable_error_bus=rank.group == 0)
        manager.subscribe_failures(received[rank.group].append)
        manager.subscribe_failures(lambda failure: ready.open())
        cluster.wait_for_healthy(3)
        step(manager)
        ended.wait()

    def leave(rank: Rank) -> str:
        manager = rank.start_manager(init_sync=False)
        cluster.wait_for_healthy(3)
        step(manager)
        manager.shutdown()
        return manager._replica_id

    for group in range(2):
        cluster.start(listen, group=group)
    (who,) = results(cluster.start(leave, group=2))
    ready.wait()
    ended.open()
    assert [failure.replica_id for failure in received[0]] == [who]
    assert received[0][0].reason == "its manager server was shut down"
    assert received[1] == []
