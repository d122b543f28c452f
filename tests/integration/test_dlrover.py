"""ElasticDataset and DistributedOptimizer in groups that train: the weights are those of one process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.bounded import often
from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.integration.test_loader import (
    SAMPLES,
    SETTINGS,
    Training,
    check,
    dataset,
    flat,
    make_model,
    make_optimizer,
)
from tests.integration.test_loader import one_process as one_process_of_batches
from tests.unit.dlrover import test_optimizer as plain
from torchft import Optimizer
from torchft.dlrover import DataShardService, DistributedOptimizer, ElasticDataset


class Samples(ElasticDataset):
    def read_sample(self, index: int) -> Any:
        return dataset()[index]

    def num_samples(self) -> int:
        return SAMPLES


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_loader_sends_its_workers_the_indices(num_workers: int) -> None:
    training = Training(start_with=2, data=Samples(), loader={"num_workers": num_workers})
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check(training, ended)


def test_a_service_returns_the_next_index_of_each_rank() -> None:
    seen: Counter[int] = Counter()

    def train(rank: Rank) -> torch.Tensor:
        model = make_model()
        sgd = make_optimizer(model)
        manager = rank.start_manager(
            load_state_dict=model.load_state_dict, state_dict=model.state_dict, use_async_quorum=False
        )
        optimizer = Optimizer(manager, sgd)
        service = DataShardService(manager, SAMPLES, **SETTINGS)
        rank.cluster.wait_for_healthy(2)
        for x, y, indices in DataLoader(Samples(service), batch_sampler=service):
            unit = service.unit
            assert unit is not None and indices.tolist() == list(unit.indices)
            with unit.accumulate(model):
                (nn.functional.mse_loss(model(x), y) * unit.weight).backward()
            seen.update(unit.indices if unit.weight else ())
            if unit.last:
                for parameter in model.parameters():
                    manager.allreduce(parameter.grad).wait()  # type: ignore[arg-type]
                optimizer.step()
                sgd.zero_grad()  # before the next step, which the service begins with its first unit
        return flat(model)

    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(train, group=group) for group in range(2)))
    assert seen == Counter(dict.fromkeys(range(SAMPLES), SETTINGS["epochs"]))
    for weights in ended:
        torch.testing.assert_close(weights, one_process_of_batches(), rtol=0, atol=1e-9)


@pytest.mark.slow  # tests/unit/dlrover/test_optimizer.py
def test_weights_with_8_4_2_1_and_4_groups_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups leave after the last step of a phase. The three that join for the last phase heal."""
    monkeypatch.setenv("MAX_WORKER_NUM", str(plain.MOST))
    counts, steps = (8, 4, 2, 1, 4), max(10, often(100))  # number of groups in each phase, and steps of each
    ends = [threading.Barrier(count) for count in counts]
    three_more = Gate()

    def train(rank: Rank) -> tuple[dict[str, Any], list[int]]:
        model = plain.make_model()
        sgd = plain.sgd(model)
        manager = rank.start_manager(
            load_state_dict=lambda state: (
                model.load_state_dict(state["model"]),
                sgd.load_state_dict(state["sgd"]),
            ),
            state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
            use_async_quorum=False,
        )
        optimizer = DistributedOptimizer(sgd, fixed_global_batch_size=True, manager=manager)
        joins = rank.group >= counts[0]
        groups: list[int] = []
        for phase, count in enumerate(counts):
            if joins and phase < 4:
                continue
            if phase == 0:
                rank.cluster.wait_for_healthy(count)
            if rank.group == 0 and phase == 4:
                three_more.open()
                rank.cluster.wait_for_waiters(3)
            while manager.current_step() < steps * (phase + 1):
                optimizer.zero_grad()
                before, groups_now = manager.current_step(), manager.num_participants()
                place = manager.participating_rank()
                for number, inputs in enumerate(plain.batch(before).split(plain.MICRO)[place::groups_now]):
                    if number:
                        optimizer.zero_grad()
                    plain.loss(model, inputs).backward()
                    optimizer.step()
                if manager.current_step() > before:
                    groups.append(groups_now)
            ends[phase].wait(60)  # no group leaves before all have committed the last step
            if not joins and rank.group >= min(counts[phase + 1 : phase + 2], default=0):
                break
        manager.shutdown()
        return dict(model.state_dict()), groups

    with Cluster() as cluster:
        first = [cluster.start(train, group=group) for group in range(counts[0])]
        three_more.wait()
        more = [cluster.start(train, group=counts[0] + number) for number in range(3)]
        ended = results(*first, *more)
    stayed = ended[0]
    late = [4] * (steps - 1)  # the first step of the last phase has begun when they ask
    assert stayed[1] == [count for count in counts[:4] for _ in range(steps)] + [1] + late
    torch.testing.assert_close(stayed[0], plain.one_process(len(counts) * steps), rtol=1e-9, atol=1e-9)
    for weights, groups in ended[-3:]:
        assert groups == late
        torch.testing.assert_close(weights, stayed[0], rtol=0, atol=0)
