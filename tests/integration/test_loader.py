"""The same training, whatever fails: groups that fail, join and lose steps end with the weights of one process."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.integration.cluster import Cluster, Gate, Rank, results
from torchft import Optimizer
from torchft.data import ElasticDataLoader
from torchft.data.position import Plan, Position

SAMPLES = 41  # no multiple of anything
SETTINGS: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, seed=3, epochs=2)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh(), torch.arange(SAMPLES))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_process() -> torch.Tensor:
    """Whole batches, each the mean over its samples, without anything of torchft but the order."""
    plan, data, model = Plan(SAMPLES, **SETTINGS), dataset(), make_model()
    optimizer = make_optimizer(model)
    position = Position()
    while position != plan.end:
        indices = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.tensors[0][indices]), data.tensors[1][indices]).backward()
        optimizer.step()
        position = plan.advance(position)
    return flat(model)


@dataclass
class Training:
    """The loop of a user, and what it trained on."""

    # Called when a group has its units of a step, by (group, life, step)
    events: dict[tuple[int, int, int], Callable[[Rank], Optional[str]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # of the Manager
    loader: dict[str, Any] = field(default_factory=dict)
    start_with: int = 1  # groups that must be alive before the first step
    wrap: Callable[[Any, nn.Module], nn.Module] = lambda manager, model: model
    lives: Counter[int] = field(default_factory=Counter)
    # The weight of each sample in the step that a group committed, by (group, step)
    committed: dict[tuple[int, int], Counter[int]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)

    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        life, self.lives[rank.group] = self.lives[rank.group], self.lives[rank.group] + 1
        net = make_model()
        sgd = make_optimizer(net)

        def save() -> dict[str, Any]:
            return {"net": net.state_dict(), "sgd": sgd.state_dict()}

        def load(state: dict[str, Any]) -> None:
            net.load_state_dict(state["net"])
            sgd.load_state_dict(state["sgd"])

        manager = rank.start_manager(load_state_dict=load, state_dict=save, **self.settings)
        model = self.wrap(manager, net)
        optimizer = Optimizer(manager, sgd)
        loader = ElasticDataLoader(manager, dataset(), **{**SETTINGS, **self.loader})
        rank.cluster.wait_for_healthy(self.start_with if life == 0 else 1)
        for step in loader:
            number = manager.current_step()
            event = self.events.get((rank.group, life, number))
            what = event(rank) if event is not None else None
            if what == "dead":
                return None
            optimizer.zero_grad()
            seen: Counter[int] = Counter()
            for unit in step:
                with unit.accumulate(model):
                    x, y, indices = unit.data
                    assert tuple(indices.tolist()) == tuple(unit.indices)
                    (nn.functional.mse_loss(model(x), y) * unit.weight).backward()
                if unit.weight:
                    seen.update(unit.indices)
            if model is net:
                for p in net.parameters():
                    assert p.grad is not None
                    manager.allreduce(p.grad).wait()
            if what == "failed":
                manager.report_error(RuntimeError("planned"))
            before = manager.current_step()
            participating = manager.is_participating()
            optimizer.step()
            if manager.current_step() > before:
                assert participating or not seen
                self.committed[rank.group, before] = seen
            else:
                error = manager.errored()
                self.lost.append(str(error.original_exception) if error else "")
        assert loader.position == Position(SETTINGS["epochs"], 0)
        return flat(net)


def check(training: Training, weights: list[Optional[torch.Tensor]], incomplete: frozenset[int] = frozenset()) -> None:
    """All ended with the weights of one process, and the groups that committed a step have each of its samples once.

    Args:
        incomplete: steps that a group committed and failed in.
    """
    expected = one_process()
    for ended in weights:
        if ended is not None:
            torch.testing.assert_close(ended, expected, rtol=0, atol=1e-9)
    plan = Plan(SAMPLES, **SETTINGS)
    seen: dict[int, Counter[int]] = {}
    for (_, number), indices in training.committed.items():
        seen.setdefault(number, Counter()).update(indices)
    position = Position()
    for number in range(plan.batches_per_epoch * plan.epochs):
        if number not in incomplete:
            batch = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
            assert seen[number] == Counter(batch), f"step {number}"
        position = plan.advance(position)
    assert position == plan.end


@pytest.mark.parametrize("use_async_quorum", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_any_number_of_groups_ends_with_the_weights_of_one_process(groups: int, use_async_quorum: bool) -> None:
    training = Training(start_with=groups, settings={"use_async_quorum": use_async_quorum})
    with Cluster(min_replicas=groups) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(groups)))
    check(training, ended)
    assert training.lost == []


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_fails_and_another_one_joins(use_async_quorum: bool) -> None:
    restart = Gate()

    def die(rank: Rank) -> str:
        rank.crash()
        restart.open()
        return "dead"

    def wait_for_three(rank: Rank) -> None:
        rank.cluster.wait_for_healthy(3)

    training = Training(start_with=3, settings={"use_async_quorum": use_async_quorum})
    training.events[2, 0, 2] = die
    training.events[0, 0, 4] = training.events[1, 0, 4] = wait_for_three
    with Cluster(min_replicas=2) as cluster:
        first = [cluster.start(training, group=group) for group in range(3)]
        cluster.wait(restart)
        ended = results(*first, cluster.start(training, group=2))
    check(training, ended)
    assert sum(weights is not None for weights in ended) == 3
    assert len(training.lost) >= 2


def test_a_step_that_a_group_fails_in_comes_again() -> None:
    training = Training(start_with=3)
    training.events[1, 0, 3] = lambda rank: "failed" if training.lost == [] else None
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    check(training, ended, incomplete=frozenset({3}))
    assert training.lost[0] == "planned"
