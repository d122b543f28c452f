"""Heals that cannot end: between groups that do not fit, with a function that hangs, from a source that
fails. The group says why, and the others train on.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.cluster import Cluster, Gate, Rank
from tests.unit.waiting import wait_until
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.transport import CheckpointError
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

JOIN_AT, STEPS = 3, 8
TIMEOUT = timedelta(seconds=4)


@pytest.mark.parametrize(
    ("theirs", "ours", "missing"),
    [
        (torch.optim.SGD, torch.optim.Adam, "betas, eps"),
        (torch.optim.Adam, torch.optim.SGD, "dampening, momentum"),
    ],
)
def test_a_group_with_another_optimizer_names_it(theirs: Any, ours: Any, missing: str) -> None:
    """PyTorch's optimizers load the state of any other kind, and fail in a later step, or train
    differently.
    """
    running, failed = Gate(), threading.Event()

    def loop(rank: Rank) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        plain = (theirs if rank.group == 0 else ours)(model.parameters(), lr=0.1)

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": plain.state_dict()}

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state["model"])
            plain.load_state_dict(state["optimizer"])

        manager = rank.start_manager(load_state_dict=load, state_dict=state)
        optimizer = OptimizerWrapper(manager, plain)
        lost: list[str] = []
        while manager.current_step() < STEPS and len(lost) < 2:
            if rank.group == 0 and manager.current_step() == JOIN_AT:
                running.open()
                rank.cluster.wait_for_another()
            if rank.group == 0 and manager.current_step() == STEPS - 1:
                assert failed.wait(60)
            before = manager.current_step()
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                manager.allreduce(parameter.grad).wait()
            optimizer.step()
            if manager.current_step() == before:
                lost.append(str(manager.errored()))
                failed.set()
        return lost

    with Cluster() as cluster:
        older = cluster.start(loop, group=0)
        cluster.wait(running)
        (newer,) = cluster.start(loop, group=1)
        lost = newer.result(90)
        cluster.ranks[1].close()
        assert len(older[0].result(90)) <= 1, "the end of the other group may cost a step"
    for error in lost:
        assert f"another optimizer than {ours.__name__}: its parameter group 0 has no {missing}" in error


@pytest.mark.slow
def test_a_state_dict_function_that_hangs_is_named() -> None:
    """Its rank tells the lighthouse, which reports the group as stalled, that the function runs. The others
    go on without the group, and heal the one that joins.
    """
    running, joining, go_on = Gate(), threading.Event(), threading.Event()
    hung: list[int] = []
    first = threading.Lock()

    def loop(rank: Rank) -> list[float]:
        weights = torch.zeros(4)

        def state() -> dict[str, torch.Tensor]:
            with first:
                hangs = joining.is_set() and not hung and rank.group != 2
                hung.extend([rank.group] if hangs else [])
            assert not hangs or go_on.wait(90)
            return {"w": weights}

        manager = rank.start_manager(
            timeout=TIMEOUT, load_state_dict=lambda state: weights.copy_(state["w"]), state_dict=state
        )
        rank.cluster.wait_for_healthy(2)
        while manager.current_step() < STEPS:
            if rank.group != 2 and manager.current_step() == JOIN_AT and not joining.is_set():
                running.open()
                assert joining.wait(60)
                rank.cluster.wait_for_waiters(1)
            manager.start_quorum()
            gradient = torch.ones(4)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weights += gradient
        return weights.tolist()

    with Cluster(join_timeout_ms=500, make_pg=lambda group: ProcessGroupGloo(TIMEOUT)) as cluster:
        loops = {group: cluster.start(loop, group)[0] for group in range(2)}
        cluster.wait(running)
        loops[2] = cluster.start(loop, group=2)[0]
        cluster.wait_for_healthy(3)
        joining.set()
        wait_until(lambda: hung)
        del loops[hung[0]]
        try:
            stalled = cluster.ranks[hung[0]].manager
            assert stalled is not None
            assert stalled._failures.progress() == (
                False,
                "runs the state_dict function 'default'",
                "",
            )
            survivor, newcomer = (one.result(90) for one in loops.values())
            assert survivor == newcomer
        finally:
            go_on.set()


class Torn(HTTPTransport[Any]):
    """The only source fails when rank 0 of a group has received its state, and rank 1 has not."""

    def __init__(self, rank: Rank, received: threading.Event) -> None:
        super().__init__(TIMEOUT, 0)
        self._rank = rank
        self._received = received

    def recv_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._rank.rank == 0:
            state = super().recv_checkpoint(*args, **kwargs)
            self._received.set()
            return state
        assert self._received.wait(60)
        for rank in self._rank.cluster.ranks:
            if rank.group == 0:
                rank.crash()
        raise CheckpointError("the source has failed")


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_rank_loads_a_state_that_another_rank_of_its_group_has_not_received(
    use_async_quorum: bool,
) -> None:
    """Otherwise the ranks of the only group left are of different steps, and it begins again from a
    checkpoint.
    """
    running, received = Gate(), threading.Event()

    def loop(rank: Rank) -> tuple[list[float], list[bool]]:
        weights = torch.full((4,), 100.0 * rank.group)
        transport: HTTPTransport[Any] = Torn(rank, received) if rank.group == 1 else HTTPTransport(TIMEOUT, 0)
        manager = rank.start_manager(
            timeout=TIMEOUT,
            load_state_dict=lambda state: weights.copy_(state["w"]),
            state_dict=lambda: {"w": weights},
            checkpoint_transport=transport,
            use_async_quorum=use_async_quorum,
        )
        if rank.group == 1:
            manager.load_state_dict({"step": 1, "batches_committed": 1})  # from a checkpoint
        decisions = []
        while manager.current_step() < JOIN_AT + 2:
            if rank.group == 0 and manager.current_step() == JOIN_AT:
                running.open()
                rank.cluster.wait_for_another()
            manager.start_quorum()
            gradient = torch.ones(4)
            manager.allreduce(gradient).wait()
            decisions.append(manager.should_commit())
            if decisions[-1]:
                weights += gradient
        transport.shutdown()
        return weights.tolist(), decisions

    with Cluster(make_pg=lambda group: ProcessGroupGloo(TIMEOUT)) as cluster:
        cluster.start(loop, group=0, world_size=2)
        cluster.wait(running)
        for one in cluster.start(loop, group=1, world_size=2):
            weights, decisions = one.result(90)
            steps = JOIN_AT + 2 - 1
            assert weights == [100.0 + steps] * 4
            assert decisions == [False] + [True] * steps
