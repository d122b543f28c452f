"""A signal for one rank drains its group: all of its ranks leave after the same step. No group loses a
step.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
import urllib.request
from collections.abc import Iterator

import pytest
import torch

from tests.integration.cluster import DEADLINE, Cluster, Rank, results
from tests.unit.waiting import wait_until
from torchft._manager import signals

RANKS, AT, END = 2, 3, 9


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test of a command may have installed a handler
    with Cluster() as built:
        yield built
    signal.signal(signal.SIGTERM, before)  # a drained group keeps its handler until the process ends
    signals._installed.clear()
    signals._end_watch()


def test_all_ranks_leave_after_the_same_step(cluster: Cluster) -> None:
    """The signaled rank does not have the manager server. It runs on the main thread, which runs signal
    handlers.
    """
    ready, told = threading.Barrier(2 * RANKS), threading.Barrier(2 * RANKS)
    # no rank ends before the others have the result of their vote
    over = [threading.Barrier(RANKS), threading.Barrier(RANKS)]
    mine: queue.SimpleQueue[Rank] = queue.SimpleQueue()

    def loop(rank: Rank) -> list[tuple[int, bool, int]]:
        manager = rank.start_manager(load_state_dict=lambda state: None, state_dict=dict)
        signaled = threading.current_thread() is threading.main_thread()
        if signaled:
            manager.leave_on(signal.SIGTERM)
        ready.wait(60)
        cluster.wait_for_healthy(2)
        steps = []
        while not manager.draining() and manager.current_step() < END:
            step = manager.current_step()
            manager.start_quorum()
            manager.allreduce(torch.ones(1)).wait()
            if step == AT:
                if signaled:
                    signal.raise_signal(signal.SIGTERM)
                    wait_until(lambda: any(member.get("draining") for member in cluster.status()["members"]))
                told.wait(60)
            steps.append((step, manager.should_commit(), manager.num_participants()))
        over[rank.group].wait(60)
        manager.shutdown()
        return steps

    def first_group(rank: Rank) -> list[tuple[int, bool, int]]:
        if rank.rank == 0:
            return loop(rank)
        mine.put(rank)
        return []

    groups = [cluster.start(first_group, 0, RANKS), cluster.start(loop, 1, RANKS)]
    here = loop(mine.get(timeout=DEADLINE.total_seconds()))
    there, _, *others = results(*groups)
    with urllib.request.urlopen(f"{cluster.lighthouse.address()}/api/v1/history", timeout=10) as answer:
        events = json.load(answer)["events"]

    # A signal is reported during the step. The quorum that is called then is the group's last one, in the
    # next step.
    both = len(here)
    assert both == AT + 2
    assert [step for step, _, _ in here] == [*range(both)] and here == there
    assert all(committed for _, committed, _ in [*here, *others[0], *others[1]])
    for other in others:
        assert [participants for *_, participants in other] == [2] * both + [1] * (END - both)
    assert not [event for event in events if event["kind"] == "failed"]
