"""Heals on the test accelerator: into existing tensors, on the target's own devices, with little additional
memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.integration.cluster import DEADLINE, Cluster, Gate, Rank, results
from tests.integration.heal_memory import check_heal
from tests.late import load
from torchft.checkpointing import CheckpointTransport, HTTPTransport, pg_transport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.checkpointing.transport import CheckpointError
from torchft.process_group import ProcessGroup

load()
from tests.late.group import ProcessGroupLate  # noqa: E402


def http(rank: Rank) -> CheckpointTransport[Any]:
    return HTTPTransport(DEADLINE, 0)


def by_group(rank: Rank) -> CheckpointTransport[Any]:
    return PGTransport(rank.pg, DEADLINE, torch.device("late", rank.group))


def late_pg(group: int) -> ProcessGroup:
    return ProcessGroupLate(timeout=DEADLINE)


@pytest.mark.parametrize("transport", [http, by_group])
@pytest.mark.parametrize("in_background", [True, False], ids=["asynchronous quorum", "synchronous quorum"])
@pytest.mark.parametrize("has_stepped", [True, False], ids=["own Adam", "fresh Adam"])
def test_a_heal_takes_no_second_copy_on_the_device(
    late: Any, transport: Callable[[Rank], CheckpointTransport[Any]], in_background: bool, has_stepped: bool
) -> None:
    late.delays(5, 0, 200)
    devices = torch.device("late", 0), torch.device("late", 1)
    check_heal(late_pg, transport, devices, width=1024, in_background=in_background, has_stepped=has_stepped)


@pytest.mark.parametrize("in_background", [True, False], ids=["asynchronous quorum", "synchronous quorum"])
def test_a_target_without_memory_costs_the_others_nothing(
    late: Any, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """The target twice fails to allocate memory for the state. The source sends it nevertheless, and
    continues.
    """
    new, trains, healed, ended = pg_transport.Destination, Gate(), threading.Event(), threading.Event()
    failures: list[CheckpointError] = []

    def full(*given: Any) -> Any:
        if len(failures) < 2:
            failures.append(CheckpointError("no memory"))
            raise failures[-1]
        return new(*given)

    monkeypatch.setattr(pg_transport, "Destination", full)

    def group(rank: Rank) -> tuple[list[bool], list[float]]:
        device = torch.device("late", rank.group)
        torch.accelerator.set_device_index(rank.group)
        state = {"first": torch.full((1000,), 1.0 + rank.group, device=device)}
        if rank.group == 0:
            state.update(
                more=torch.full((2000,), 3.0, device=device), last=torch.full((1000,), 4.0, device=device)
            )
        else:
            rank.cluster.wait(trains)
        manager = rank.start_manager(
            state_dict=lambda: state,
            load_state_dict=lambda healthy: (state.update(healthy), healed.set()),
            checkpoint_transport=by_group(rank),
            use_async_quorum=in_background,
        )
        votes: list[bool] = []
        while not (healed.is_set() and manager.num_participants() == 2):
            manager.start_quorum()
            manager.allreduce(torch.ones(8, device=device)).wait()
            votes.append(manager.should_commit())
            trains.open()
        if rank.group == 0:
            assert ended.wait(60)
        ended.set()
        return votes, [tensor[0].item() for tensor in state.values()]

    with Cluster(make_pg=late_pg) as cluster:
        (votes, source), (_, target) = results(cluster.start(group, 0), cluster.start(group, 1))
    assert all(votes) and len(failures) == 2
    assert target == source == [1.0, 3.0, 4.0]


@pytest.mark.slow  # test_a_transfer_may_take_longer_than_the_timeout in test_transports.py checks both ends
def test_the_others_wait_for_a_heal_on_a_device_that_makes_progress(
    late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is lost, though the heal takes longer than the timeout."""
    timeout, send, trains = timedelta(seconds=4), pg_transport._Channel._send, Gate()

    def send_slowly(channel: Any, data: torch.Tensor) -> None:
        late.enqueue(lambda: time.sleep(0.5))
        send(channel, data)

    monkeypatch.setattr(pg_transport._Channel, "_send", send_slowly)

    def group(rank: Rank) -> tuple[list[bool], list[float], float]:
        device = torch.device("late", rank.group)
        torch.accelerator.set_device_index(rank.group)
        weights = torch.full((1 << 20,), 1.0 + rank.group, device=device)  # in 16 pieces
        if rank.group == 1:
            rank.cluster.wait(trains)
        manager = rank.start_manager(
            timeout=timeout,
            state_dict=lambda: {"w": weights},
            load_state_dict=lambda state: weights.copy_(state["w"]),
            checkpoint_transport=PGTransport(rank.pg, timeout, device),
        )
        votes: list[bool] = []
        together = 0
        while together < 2:
            if rank.group == 0 and manager.current_step() == 2:
                trains.open()
                rank.cluster.wait_for_waiters(1)
            manager.start_quorum()
            manager.allreduce(torch.ones(8, device=device)).wait()
            votes.append(manager.should_commit())
            together += manager.num_participants() == 2
        return votes, weights[:2].tolist(), manager.recovery_seconds().get("transfer", 0.0)

    with Cluster(make_pg=late_pg) as cluster:
        source, target = results(cluster.start(group, 0), cluster.start(group, 1))
    assert all(source[0]) and all(target[0]) and source[1] == target[1] == [1.0, 1.0]
    assert target[2] > timeout.total_seconds()
