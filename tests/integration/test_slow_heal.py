"""A heal that takes longer than the timeout: the other groups wait for it as long as it makes progress."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.integration.cluster import Cluster, Gate, Rank, results
from torchft.checkpointing import HTTPTransport
from torchft.process_group import ProcessGroupGloo

# Shorter than the heal of one rank, and longer than a pause of a busy machine.
TIMEOUT = timedelta(seconds=4)
RATE = 1 << 20  # bytes per second of that heal
SECONDS = 7
STEPS = 5


def train(rank: Rank, reached: Gate, use_async_quorum: bool) -> dict[str, Any]:
    """Rank 0 of a group has a small state, and rank 1 one that takes long."""
    weights = torch.zeros(RATE * SECONDS // 4 if rank.rank == 1 else 10)
    transport = HTTPTransport[Any](TIMEOUT, 0, bandwidth_limit=RATE)
    decisions: list[bool] = []
    phases: dict[str, float] = {}
    try:
        manager = rank.start_manager(
            timeout=TIMEOUT,
            state_dict=lambda: {"w": weights},
            load_state_dict=lambda state: weights.copy_(state["w"]),
            checkpoint_transport=transport,
            use_async_quorum=use_async_quorum,
        )
        while manager.current_step() < STEPS:
            if rank.group == 0 and manager.current_step() == 2:
                reached.open()
                rank.cluster.wait_for_waiters(1)
            manager.start_quorum()
            gradient = torch.ones(5)
            manager.allreduce(gradient).wait()
            decisions.append(manager.should_commit())
            if decisions[-1]:
                weights += gradient.mean()
        phases = manager.recovery_seconds()
    finally:
        transport.shutdown()
    return {"decisions": decisions, "weights": weights, "transfer": phases["transfer"]}


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_the_others_wait_for_a_heal_that_makes_progress(use_async_quorum: bool) -> None:
    """No step is lost, and the heal is not begun again. The ranks of a group vote, though one has healed long before
    the other one.
    """
    reached = Gate()
    with Cluster(make_pg=lambda group: ProcessGroupGloo(timeout=TIMEOUT)) as cluster:
        first = cluster.start(lambda rank: train(rank, reached, use_async_quorum), group=0, world_size=2)
        cluster.wait(reached)
        second = cluster.start(lambda rank: train(rank, reached, use_async_quorum), group=1, world_size=2)
        survivors, healed = results(first), results(second)
    assert [one["decisions"] for one in survivors] == 2 * [[True] * STEPS]
    assert [one["decisions"] for one in healed] == 2 * [[True] * (STEPS - 3)]  # the others had begun step 2
    assert healed[1]["transfer"] > TIMEOUT.total_seconds()
    for mine, theirs in zip(healed, survivors):
        assert torch.equal(mine["weights"], theirs["weights"])
