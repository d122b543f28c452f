"""Loops that ask in another way than the usual one train on as before, while their quorum stands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import torchft
from torchft.manager import Manager

from .cluster import Cluster, Rank, results

Ask = Callable[[Manager, int], None]


def usual(manager: Manager, step: int) -> None:
    manager.start_quorum()


def without_heal(manager: Manager, step: int) -> None:
    manager.start_quorum(allow_heal=False)


def shrink_only(manager: Manager, step: int) -> None:
    manager.start_quorum(shrink_only=step > 0)  # at first no group is in the last quorum


def shrink_only_once(manager: Manager, step: int) -> None:
    manager.start_quorum(shrink_only=step == 3)


def twice(manager: Manager, step: int) -> None:
    manager.start_quorum()
    manager.start_quorum()


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "ask",
    [
        usual,
        without_heal,
        shrink_only,
        shrink_only_once,
        twice,
    ],
)
def test_no_step_is_lost_and_none_needs_the_lighthouse(ask: Ask, use_async_quorum: bool) -> None:
    with Cluster(min_replicas=2) as cluster:
        together = threading.Barrier(2, timeout=60)

        def loop(rank: Rank) -> list[float]:
            manager = rank.start_manager(use_async_quorum=use_async_quorum, init_sync=False)
            averages = []
            for step in range(10):
                if step == 7 and together.wait() == 0:
                    cluster.lighthouse.shutdown()
                if step == 7:
                    together.wait()
                ask(manager, step)
                gradient = torch.full((2,), float(rank.group + step))
                manager.allreduce(gradient).wait()
                assert manager.should_commit()
                averages.append(gradient[0].item())
            assert manager.current_step() == 10
            return averages

        groups = [cluster.start(loop, group)[0] for group in range(2)]
        for group in groups:
            assert group.result(timeout=120)[1:] == [step + 0.5 for step in range(1, 10)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_over_a_loader_asks_at_its_begin_and_its_end(stream: bool) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(40, 2))

    with Cluster(min_replicas=2) as cluster:

        def loop(rank: Rank) -> list[int]:
            job = torchft.Job(manager=rank.start_manager(), device="cpu")
            rounds, asked = job.manager._rounds, list[int]()
            assert rounds is not None
            begin = rounds.begin

            def recorded(*given: Any) -> Any:
                asked.append(job.step)
                return begin(*given)

            rounds.begin = recorded  # type: ignore[method-assign]
            net = nn.Linear(2, 1)
            model, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
            data = Stream() if stream else TensorDataset(torch.ones(40, 2))
            rank.cluster.wait_for_healthy(2)
            for step in job.loader(data, global_batch_size=4, micro_batch_size=2):
                for batch in step:
                    step.backward(model(batch if stream else batch[0]).mean())
                assert step.commit()
            return asked

        assert results(*(cluster.start(loop, group) for group in range(2))) == [[0, 1, 10], [0, 1, 10]]
