"""Between two steps a group is in no quorum, so heals and checkpoints contain the changes that its loop makes
there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
import torch
from torch import nn

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
from torchft import Optimizer
from torchft.data import ElasticDataLoader
from torchft.data.position import DataPlan, DataPosition
from torchft.local_sgd import DiLoCo

PLAN = DataPlan(SAMPLES, **SETTINGS)
STEPS = PLAN.batches_per_epoch * PLAN.epochs


def steps_before(position: DataPosition) -> int:
    return position.epoch * PLAN.batches_per_epoch + position.batch


@dataclass
class Scheduled:
    """A loop with a learning rate schedule, which is part of the state, and with checkpoints."""

    restart: Gate = field(default_factory=Gate)
    lives: Counter[int] = field(default_factory=Counter)
    rates: dict[int, set[float]] = field(default_factory=dict)  # learning rates of all groups, by step
    checkpoints: list[tuple[int, int, int]] = field(default_factory=list)

    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        life, self.lives[rank.group] = self.lives[rank.group], self.lives[rank.group] + 1
        net = make_model()
        sgd = make_optimizer(net)
        schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=1, gamma=0.5)
        parts: dict[str, Any] = {"net": net, "sgd": sgd, "schedule": schedule}

        def load(state: dict[str, Any]) -> None:
            for name, part in parts.items():
                part.load_state_dict(state[name])

        manager = rank.start_manager(
            load_state_dict=load, state_dict=lambda: {name: part.state_dict() for name, part in parts.items()}
        )
        optimizer = Optimizer(manager, sgd)
        loader = ElasticDataLoader(manager, dataset(), **SETTINGS)
        if life == 0:
            rank.cluster.wait_for_healthy(2)
        for step in loader:
            number = manager.current_step()
            if rank.group == 1 and life == 0 and number == 2:
                rank.crash()
                self.restart.wait()
                return None
            if rank.group == 0 and number == 4:
                self.restart.open()
                # The other group heals as soon as this one requests the next quorum.
                rank.cluster.wait_for_waiters(1)
            optimizer.zero_grad()
            for unit in step:
                with unit.accumulate(net):
                    (nn.functional.mse_loss(net(unit.data[0]), unit.data[1]) * unit.weight).backward()
            for p in net.parameters():
                manager.allreduce(p.grad).wait()
            optimizer.step()
            if not step.committed:
                continue
            self.rates.setdefault(manager.current_step() - 1, set()).add(sgd.param_groups[0]["lr"])
            schedule.step()
            saved, position = manager.state_dict(), loader.state_dict()
            at = DataPosition(position["epoch"], position["batch"])
            self.checkpoints.append((saved["step"], steps_before(at), schedule.last_epoch))
        return flat(net)


def test_a_heal_contains_changes_after_the_last_step() -> None:
    """If the next quorum were requested as soon as a step is committed, the others would serve an
    outdated learning rate.
    """
    job = Scheduled()
    with Cluster(min_replicas=1) as cluster:
        first = [cluster.start(job, group=group) for group in range(2)]
        cluster.wait(job.restart)
        ended = results(*first, cluster.start(job, group=1))
    one, other = (weights for weights in ended if weights is not None)
    assert torch.equal(one, other)
    assert job.rates == {step: {0.1 * 0.5**step} for step in range(STEPS)}


def test_a_checkpoint_between_two_steps_is_consistent() -> None:
    job = Scheduled()
    with Cluster(min_replicas=1) as cluster:
        first = [cluster.start(job, group=group) for group in range(2)]
        cluster.wait(job.restart)
        results(*first, cluster.start(job, group=1))
    assert all(step == batches == scheduled for step, batches, scheduled in job.checkpoints)
    assert {step for step, _, _ in job.checkpoints} == set(range(1, STEPS + 1))


# Other parts of a job with a loader


def once(what: str) -> Callable[[Rank], Optional[str]]:
    remaining = iter([what])
    return lambda rank: next(remaining, None)


@pytest.mark.parametrize("groups", [(0, 1), (1,)])
@pytest.mark.parametrize("step", [0, 3, STEPS - 1])
def test_a_step_whose_optimizer_did_not_step_is_repeated(step: int, groups: tuple[int, ...]) -> None:
    """This happens if a GradScaler finds infinities in all groups. If only one group does not step, it
    heals.
    """
    training = Training(start_with=2, events={(group, 0, step): once("left out") for group in groups})
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check(training, ended, incomplete=frozenset() if len(groups) == 2 else frozenset({step}))


@pytest.mark.parametrize("reproducible", [False, True])
def test_more_groups_than_units_end_with_the_weights_of_one_process(reproducible: bool) -> None:
    """The last batch of an epoch has one unit, the other batches have two."""
    sizes = {"global_batch_size": 12, "micro_batch_size": 6}
    training = Training(start_with=3, loader=sizes, settings={"reproducible_reduction": reproducible})
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    check(training, ended)
    assert training.lost == []
    assert sum(not indices for indices in training.committed.values()) == (3 - 2) * 6 + (3 - 1) * 2


def test_diloco_is_refused_with_reproducible_reduction() -> None:
    def loop(rank: Rank) -> None:
        manager = rank.start_manager(
            reproducible_reduction=True,
            use_async_quorum=False,
            load_state_dict=lambda state: None,
            state_dict=dict,
        )
        net = make_model()
        outer = torch.optim.SGD(net.parameters(), lr=0.7)
        with (
            pytest.raises(
                ValueError, match=r"DiLoCo.*: reproducible_reduction=True is for .* choose reprod.*=False"
            ),
            DiLoCo(manager, [net], make_optimizer(net), outer, sync_every=2),
        ):
            raise AssertionError("it was not refused")

    with Cluster() as cluster:
        results(cluster.start(loop, group=0))
