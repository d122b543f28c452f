"""Groups that heal step with the hyperparameters of the others, whatever the script's functions give and
load.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from tests.integration.cluster import Cluster, Gate, Rank, results
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper

STEPS, CRASH_AT, JOIN_AT = 12, 3, 6

Made = tuple[Optimizer, Optional[LRScheduler]]
Parts = tuple[nn.Module, Optimizer, Optional[LRScheduler]]


def sgd(parameters: Any) -> tuple[Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return optimizer, StepLR(optimizer, step_size=2, gamma=0.5)


def adam(parameters: Any) -> tuple[Optimizer, LRScheduler]:
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    return optimizer, CosineAnnealingLR(optimizer, T_max=STEPS)


def adam_with_a_tensor(parameters: Any) -> tuple[Optimizer, LRScheduler]:
    optimizer = torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False)
    return optimizer, CosineAnnealingLR(optimizer, T_max=STEPS)


def sgd_by_step(parameters: Any) -> tuple[Optimizer, None]:
    return torch.optim.SGD(parameters, lr=0.1), None


class Everything:
    """The functions of a script that gives and loads all."""

    def __init__(self, parts: Parts) -> None:
        self.model, self.optimizer, self.scheduler = parts

    def read(self) -> Any:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
        }

    def load(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


class KeptOptimizer(Everything):
    """As torchtitan's container, which keeps the dict of its optimizer: tensors are shared, numbers stay."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        groups = copy.deepcopy(
            [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        )
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0
        self.optimizer.step()  # makes the state
        for group, values in zip(self.optimizer.param_groups, groups):
            group.update(values)
        self._keep()

    def _keep(self) -> None:
        self._kept = copy.copy(self.optimizer.state_dict())
        self._kept["param_groups"] = copy.deepcopy(self._kept["param_groups"])

    def read(self) -> Any:
        return {**super().read(), "optimizer": self._kept}

    def load(self, state: Any) -> None:
        super().load(state)
        self._keep()


class NoGroups(Everything):
    """Gives the optimizer's state without its hyperparameters."""

    def read(self) -> Any:
        return {**super().read(), "optimizer": self.optimizer.state_dict()["state"]}

    def load(self, state: Any) -> None:
        own = self.optimizer.state_dict()["param_groups"]
        super().load({**state, "optimizer": {"state": state["optimizer"], "param_groups": own}})


class Training:
    """Two groups: the second crashes, and joins again."""

    def __init__(self, make: Callable[[Any], Made], functions: type[Everything]) -> None:
        self.make = make
        self.functions = functions
        self.crashed, self.join, self.healed = Gate(), Gate(), 0
        self.weights: dict[tuple[int, int], list[torch.Tensor]] = {}  # after each step, by group and step

    def loop(self, rank: Rank, restarted: bool = False) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        inner, scheduler = self.make(model.parameters())
        functions = self.functions((model, inner, scheduler))
        manager = rank.start_manager(
            load_state_dict=functions.load, state_dict=functions.read, compare_commits=1
        )
        ddp, optimizer = DistributedDataParallel(manager, model), OptimizerWrapper(manager, inner)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        if not restarted:
            rank.cluster.wait_for_healthy(2)
        while (step := manager.current_step()) < STEPS:
            if rank.group == 0 and step == JOIN_AT:
                self.join.open()
                rank.cluster.wait_for_another()
            optimizer.zero_grad()
            if scheduler is None:
                manager.wait_quorum()  # the step is known then
                inner.param_groups[0]["lr"] = 0.1 / (1 + manager.current_step())
            generator = torch.Generator().manual_seed(100 * step + rank.group)
            loss = ddp(torch.randn(4, 8, generator=generator)).square().mean()
            if rank.group == 1 and not restarted and step == CRASH_AT:
                manager.wait_quorum()
                rank.crash()
                self.crashed.open()
                return
            scaler.scale(loss).backward()
            before = manager.batches_committed()
            scaler.step(optimizer)
            scaler.update()
            if manager.batches_committed() > before:
                if scheduler is not None:
                    scheduler.step()
                ended = manager.current_step()
                self.weights[rank.group, ended] = [p.detach().clone() for p in model.parameters()]
        self.healed += manager.recovery_seconds()["load"] > 0


@pytest.mark.parametrize(
    ("make", "functions"),
    [
        (sgd, Everything),
        (adam_with_a_tensor, KeptOptimizer),
        (sgd_by_step, NoGroups),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *itertools.product([sgd, adam, adam_with_a_tensor], [KeptOptimizer, NoGroups]),
                *itertools.product([adam, adam_with_a_tensor, sgd_by_step], [Everything]),
            )
            if case != (adam_with_a_tensor, KeptOptimizer)
        ),
    ],
)
def test_a_group_that_heals_steps_with_the_learning_rate_of_the_others(
    make: Any, functions: type[Everything], caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(make, functions)
    with Cluster() as cluster:
        first = [cluster.start(training.loop, group=group) for group in range(2)]
        cluster.wait(training.join)
        again = cluster.start(lambda rank: training.loop(rank, restarted=True), group=1)
        results(*first, again)
    healed = [step for step in range(JOIN_AT + 1, STEPS + 1) if (1, step) in training.weights]
    assert training.healed and healed[-1] == STEPS
    for step in healed:
        for one, other in zip(training.weights[0, step], training.weights[1, step]):
            assert torch.equal(one, other), f"step {step} of {healed}"
    assert not [r for r in caplog.records if "other bits" in r.getMessage() or "differ" in r.getMessage()]
