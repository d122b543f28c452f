"""A heal that takes longer than the timeout: the other groups wait for it as long as it makes progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore, Work

from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.unit.process_group.backends import NATIVE
from tests.unit.process_group.ranks import native
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroup, ProcessGroupGloo

# Shorter than the heal of one rank, and longer than a pause of a busy machine.
TIMEOUT = timedelta(seconds=4)
RATE = 1 << 20  # bytes per second of that heal
SECONDS = 7
STEPS = 3  # that both groups take part in


class Native:
    """Makes PyTorch's own groups. Those of one rank of all replica groups meet in a store that they share."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(2)]
        self._made = [0, 0]  # by replica group: the number of its ranks

    def __call__(self, group: int) -> Any:
        rank = self._made[group]
        self._made[group] += 1
        store = TCPStore("localhost", self._stores[rank].port, is_master=False, wait_for_workers=False)
        made = native(store, group, 2)
        made.set_timeout(self._timeout)
        return made


def each(kind: type[ProcessGroup]) -> Callable[[timedelta], Callable[[int], Any]]:
    return lambda timeout: lambda group: kind(timeout)


class Slow(ProcessGroupGloo):
    """Sends the messages of a transfer at that rate."""

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Work:
        time.sleep(tensors[0].nbytes / RATE)
        return super().send(tensors, dst_rank, tag)


def train(rank: Rank, reached: Gate, use_async_quorum: bool, over_group: bool, heal: str) -> dict[str, Any]:
    """Rank 0 of a group has a small state, and rank 1 one that takes long."""
    weights = torch.zeros(RATE * SECONDS // 4 if rank.rank == 1 else 10)
    transport: CheckpointTransport[Any] = (
        PGTransport(rank.pg, TIMEOUT, torch.device("cpu"))
        if over_group
        else HTTPTransport(TIMEOUT, 0, bandwidth_limit=RATE)
    )
    decisions: list[bool] = []
    phases: dict[str, float] = {}
    together = 0
    try:
        manager = rank.start_manager(
            timeout=TIMEOUT,
            state_dict=lambda: {"w": weights},
            load_state_dict=lambda state: weights.copy_(state["w"]),
            checkpoint_transport=transport,
            use_async_quorum=use_async_quorum,
            heal=heal,
        )
        while together < STEPS:
            if rank.group == 0 and manager.current_step() == 2:
                reached.open()
                rank.cluster.wait_for_waiters(1)
            manager.start_quorum()
            gradient = torch.ones(5)
            manager.allreduce(gradient).wait()
            decisions.append(manager.should_commit())
            if decisions[-1]:
                weights += gradient.mean()
                together += manager.num_participants() == 2
        phases = manager.recovery_seconds()
    finally:
        transport.shutdown()
    return {"decisions": decisions, "weights": weights, "transfer": phases["transfer"]}


@pytest.mark.parametrize(
    ("use_async_quorum", "make_pg", "over_group", "heal"),
    [
        pytest.param(True, each(ProcessGroupGloo), False, "at_once", id="asynchronous"),
        # Seven seconds each.
        pytest.param(
            False, each(ProcessGroupGloo), False, "at_once", id="synchronous", marks=pytest.mark.slow
        ),
        # It has no optimizer.
        pytest.param(
            True, each(ProcessGroupGloo), False, "in_passing", id="fall-back", marks=pytest.mark.slow
        ),
        pytest.param(True, each(Slow), True, "at_once", id="PGTransport", marks=pytest.mark.slow),
        pytest.param(
            True,
            Native,
            False,
            "at_once",
            id="native",
            marks=[pytest.mark.slow, pytest.mark.skipif(not NATIVE, reason="needs PyTorch >= 2.14")],
        ),
    ],
)
def test_the_others_wait_for_a_heal_that_makes_progress(
    use_async_quorum: bool, make_pg: Callable[[timedelta], Callable[[int], Any]], over_group: bool, heal: str
) -> None:
    """No step is lost, and the heal is not begun again. The ranks of a group vote, though one has healed long
    before the other one. With heal="in_passing" the others train on while the group connects, and wait for
    its whole state.
    """
    reached = Gate()

    def one(rank: Rank) -> dict[str, Any]:
        return train(rank, reached, use_async_quorum, over_group, heal)

    with Cluster(make_pg=make_pg(TIMEOUT)) as cluster:
        first = cluster.start(one, group=0, world_size=2)
        cluster.wait(reached)
        second = cluster.start(one, group=1, world_size=2)
        survivors, healed = results(first), results(second)
    assert all(all(one["decisions"]) for one in survivors)
    for one in healed:
        assert one["decisions"] == sorted(one["decisions"]) and (
            heal == "in_passing" or all(one["decisions"])
        )
    assert healed[1]["transfer"] > TIMEOUT.total_seconds()
    for mine, theirs in zip(healed, survivors):
        assert torch.equal(mine["weights"], theirs["weights"])
