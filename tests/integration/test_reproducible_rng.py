"""reproducible_rng with reproducible_reduction: dropout and augmentation depend on the unit, not on the
rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Optional

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.integration.test_loader import SETTINGS, dataset, flat, make_model, make_optimizer
from torchft import Optimizer
from torchft.data import ElasticDataLoader

GROUPS = 3
FAILS_AT, JOINS_AT = 2, 4
# Groups are threads, which share the generators. As processes they would have their own.
_NUMBERS = threading.Lock()


class Augmented(Dataset):
    """Adds noise from torch and from numpy to each sample."""

    def __init__(self) -> None:
        self.data = dataset()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, _ = self.data[index]
        return x + 0.1 * torch.randn(4, dtype=torch.float64) + 0.1 * float(numpy.random.rand()), y


@dataclass
class Training:
    """Each group draws further random numbers between two units."""

    restart: Optional[Gate] = None
    reproducible_rng: bool = True
    lives: Counter[int] = field(default_factory=Counter)
    groups_of_units: dict[tuple[int, int, int], set[int]] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        life, self.lives[rank.group] = self.lives[rank.group], self.lives[rank.group] + 1
        net = nn.Sequential(nn.Dropout(0.3), make_model(), nn.Dropout(0.2))
        sgd = make_optimizer(net)
        manager = rank.start_manager(
            load_state_dict=lambda state: (
                net.load_state_dict(state["net"]),
                sgd.load_state_dict(state["sgd"]),
            ),
            state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
            reproducible_reduction=True,
        )
        # PyTorch's DataLoader draws a number when it begins to read, here perhaps within another group's
        # forward pass.
        own: Any = {"generator": torch.Generator()}
        loader = ElasticDataLoader(
            manager, Augmented(), **SETTINGS, reproducible_rng=self.reproducible_rng, **own
        )
        optimizer = Optimizer(manager, sgd)
        if self.restart is not None:
            rank.cluster.wait_for_healthy(GROUPS)
        for step in loader:
            number = manager.current_step()
            if self.restart is not None and life == 0:
                if rank.group == 2 and number == FAILS_AT:
                    rank.crash()
                    self.restart.open()
                    return None
                if rank.group != 2 and number == JOINS_AT:
                    rank.cluster.wait_for_healthy(GROUPS)
            optimizer.zero_grad()
            units = iter(step)
            while True:
                with contextlib.ExitStack() as stack:
                    with _NUMBERS:
                        torch.rand(rank.group + 1)
                        numpy.random.rand(rank.group + 1)
                        if (unit := next(units, None)) is None:
                            break
                        stack.enter_context(unit.accumulate(net))
                        loss = nn.functional.mse_loss(net(unit.data[0]), unit.data[1])
                    (loss * unit.weight).backward()
                if unit.weight:
                    at = step.position.epoch, step.position.batch, unit.indices[0]
                    self.groups_of_units.setdefault(at, set()).add(rank.group)
            optimizer.step()
        return flat(net)


def one_group(**settings: Any) -> torch.Tensor:
    with Cluster() as cluster:
        (ended,) = results(cluster.start(Training(**settings), group=0))
    assert ended is not None
    return ended


def test_groups_that_fail_and_join_end_with_the_bits_of_one_process_with_random_numbers() -> None:
    training = Training(restart=Gate())
    with Cluster(min_replicas=2) as cluster:
        first = [cluster.start(training, group=group) for group in range(GROUPS)]
        assert training.restart is not None
        cluster.wait(training.restart)
        ended = results(*first, cluster.start(training, group=2))
    alone = one_group()
    assert sum(weights is not None for weights in ended) == GROUPS
    assert all(weights is None or torch.equal(weights, alone) for weights in ended)
    assert set.union(*training.groups_of_units.values()) == {0, 1, 2}
    assert not torch.equal(one_group(reproducible_rng=False), alone), "the random numbers had no effect"
