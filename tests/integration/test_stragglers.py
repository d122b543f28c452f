"""A group whose own work takes longer is named, until it is as fast as the others again."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from typing import Any

import pytest
import torch

from torchft.cli import events, status

from .cluster import Cluster, Rank

SLOW, USUAL = 0.15, 0.03  # seconds of a step's own work


def recorded(cluster: Cluster) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{cluster.lighthouse.address()}/api/v1/history", timeout=10) as response:
        return [e for e in json.load(response)["events"] if e["kind"] == "straggler"]


@pytest.mark.slow  # go/quorum has the rule
def test_the_slow_group_is_named_and_no_other_one() -> None:
    with Cluster(min_replicas=3) as cluster:
        named, over = threading.Event(), threading.Event()

        def loop(rank: Rank) -> None:
            manager = rank.start_manager(init_sync=False)
            while not manager.draining():
                manager.start_quorum()
                # only a lesser part of the step, since reductions and votes take long on a busy host
                time.sleep(SLOW if rank.group == 1 and not named.is_set() else USUAL)
                manager.allreduce(torch.ones(2)).wait()
                # all groups end in one step: one that has seen the end says so in the reduction
                ends = torch.tensor([float(over.is_set())])
                manager.allreduce(ends).wait()
                manager.should_commit()
                if ends.item() > 0:
                    return

        loops = [future for group in range(3) for future in cluster.start(loop, group)]
        try:
            (slow,) = cluster.wait_for_stragglers(1)
            assert slow["replica_id"].startswith("group_1:")
            assert status.state(slow) == "straggler"
            assert slow["own_ms"] > 1000 * SLOW * 0.9
            (event,) = recorded(cluster)
            assert "group_1" in events.words(event) and "is slower than the others" in events.words(event)
            assert "load " in event["reason"] and " times the others' " in event["reason"]
            named.set()
            cluster.wait_for_stragglers(0)
        finally:
            named.set()
            over.set()
        for future in loops:
            future.result(timeout=60)
