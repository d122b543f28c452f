"""LocalSGD and DiLoCo with an ElasticDataLoader: positions heal with the state, and lost samples are
counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
import torch
from torch import nn

from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.integration.test_loader import SAMPLES, SETTINGS, dataset, flat, make_model
from torchft.data import ElasticDataLoader
from torchft.data.position import DataPlan, DataPosition
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import WorldSizeMode

PERIOD = 4  # inner steps; an epoch has as many
EPOCHS = 3
TOTAL = SAMPLES * EPOCHS
PLAN = DataPlan(SAMPLES, **{**SETTINGS, "epochs": EPOCHS})


def local_sgd(manager: Any, model: nn.Module, inner: torch.optim.Optimizer) -> LocalSGD:
    return LocalSGD(manager, model, inner, PERIOD)


def diloco(manager: Any, model: nn.Module, inner: torch.optim.Optimizer) -> DiLoCo:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], inner, outer, PERIOD)


def streaming_diloco(manager: Any, model: nn.Module, inner: torch.optim.Optimizer) -> DiLoCo:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], inner, outer, PERIOD, fragment_sync_delay=1)


@dataclass
class Ended:
    """The final state of a group."""

    weights: torch.Tensor
    committed: int
    lost: int


@dataclass
class Training:
    """A user's training loop.

    Attributes:
        algorithm: LocalSGD or DiLoCo.
        settings: further arguments of the Manager.
        events: called before an inner step, by (group, number of the step); "crashed" ends the group.
        fails: synchronizations that a group votes against, by (group, number from 0).
        seen: samples of each epoch.
    """

    algorithm: Callable[..., Any]
    start_with: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    loader_first: bool = False
    events: dict[tuple[int, int], Callable[[Rank], Optional[str]]] = field(default_factory=dict)
    fails: set[tuple[int, int]] = field(default_factory=set)
    seen: dict[int, Counter[int]] = field(default_factory=dict)
    parts: dict[tuple[int, DataPosition], int] = field(default_factory=dict)
    reduced: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    def __call__(self, rank: Rank) -> Optional[Ended]:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = rank.start_manager(
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            use_async_quorum=False,
            **self.settings,
        )
        votes, vote = iter(range(100)), manager.should_commit

        def should_commit() -> bool:
            number = next(votes)
            if number in {vote for _, vote in self.fails}:
                self.reduced.wait(60)  # else the abort of one group would end the reduction of another one
            if (rank.group, number) in self.fails:
                manager.report_error(RuntimeError("planned"))
            return vote()

        manager.should_commit = should_commit  # type: ignore[method-assign]
        data = {**SETTINGS, "epochs": EPOCHS}
        loader = ElasticDataLoader(manager, dataset(), **data) if self.loader_first else None
        algorithm = self.algorithm(manager, model, inner)
        loader = loader or ElasticDataLoader(manager, dataset(), **data)
        rank.cluster.wait_for_healthy(self.start_with)
        with algorithm:
            for step in loader:
                event = self.events.get(
                    (rank.group, PLAN.batches_per_epoch * step.position.epoch + step.position.batch)
                )
                if event is not None and event(rank) == "crashed":
                    return None
                inner.zero_grad()
                weights = 0.0
                for unit in step:
                    x, y, _ = unit.data
                    with unit.accumulate(model):
                        (nn.functional.mse_loss(model(x), y) * unit.weight).backward()
                    weights += unit.weight
                    if unit.weight:
                        self.seen.setdefault(step.position.epoch, Counter()).update(unit.indices)
                        key = rank.group, step.position
                        self.parts[key] = self.parts.get(key, 0) + len(unit.indices)
                # the mean over this group's samples; a spare has none
                assert weights == pytest.approx(1 if manager.is_participating() else 0)
                inner.step()
        assert loader.position == PLAN.end
        if isinstance(algorithm, DiLoCo):
            algorithm.restore_global_parameters()
        return Ended(flat(model), loader.committed, loader.lost)

    def part(self, group: int, epoch: int) -> int:
        """Returns the samples that a group has trained on in an epoch, which is one period here."""
        return sum(
            size for (g, position), size in self.parts.items() if (g, position.epoch) == (group, epoch)
        )


def agree(ended: list[Optional[Ended]]) -> tuple[int, int]:
    """Checks that all groups that reached the end have equal weights and counts."""
    first, *others = [each for each in ended if each is not None]
    for other in others:
        torch.testing.assert_close(other.weights, first.weights, rtol=0, atol=1e-12)
        assert (other.committed, other.lost) == (first.committed, first.lost)
    assert first.committed + first.lost == TOTAL
    return first.committed, first.lost


def test_an_average_that_arrives_later_contains_the_samples_before_it_was_sent() -> None:
    training = Training(streaming_diloco, start_with=2)
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    committed, lost = agree(ended)
    last_batch = SAMPLES % SETTINGS["global_batch_size"]  # trained on after the last average was sent
    assert (committed, lost) == (TOTAL - last_batch, last_batch)


@pytest.mark.parametrize("loader_first", [True, False])
@pytest.mark.parametrize("algorithm", [local_sgd, diloco])
def test_without_a_fault_each_sample_counts_once_an_epoch(
    algorithm: Callable[..., Any], loader_first: bool
) -> None:
    training = Training(algorithm, start_with=2, loader_first=loader_first)
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    assert agree(ended) == (TOTAL, 0)
    assert training.seen == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}


@pytest.mark.parametrize("algorithm", [local_sgd, diloco])
def test_a_spare_group_takes_no_samples(algorithm: Callable[..., Any]) -> None:
    """Its parameters are in no average, so its samples would be lost."""
    fixed = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}
    training = Training(algorithm, start_with=3, settings=fixed)
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    assert agree(ended) == (TOTAL, 0)
    assert training.seen == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}


@pytest.mark.parametrize("algorithm", [local_sgd, diloco])
def test_samples_of_a_failed_group_are_lost_until_the_next_average(
    algorithm: Callable[..., Any],
) -> None:
    def fail(rank: Rank) -> str:
        rank.crash()
        return "crashed"

    training = Training(algorithm, start_with=3, events={(2, PERIOD + 2): fail})
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    committed, lost = agree(ended)
    # In the second epoch the group had done two inner steps, and two were left.
    assert committed == 2 * SAMPLES + training.part(0, 1) + training.part(1, 1)
    assert 0 < training.part(2, 1) < lost
    assert training.seen[2] == Counter(range(SAMPLES))  # the other groups share all of it


def test_samples_of_a_synchronization_that_fails_are_lost_with_diloco() -> None:
    """The first vote belongs to the loader; the second one is at the end of the first epoch."""
    training = Training(diloco, start_with=2, fails={(0, 1), (1, 1)})
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    assert agree(ended) == (TOTAL - SAMPLES, SAMPLES)


def test_samples_of_a_synchronization_that_fails_count_in_the_next_one_with_local_sgd() -> None:
    training = Training(local_sgd, start_with=2, fails={(0, 1), (1, 1)})
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    assert agree(ended) == (TOTAL, 0)


@pytest.mark.parametrize("algorithm", [local_sgd, diloco])
def test_a_group_whose_synchronization_alone_fails_heals_and_loses_its_samples_of_the_period(
    algorithm: Callable[..., Any],
) -> None:
    training = Training(algorithm, start_with=2, fails={(1, 1)})
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    assert agree(ended) == (TOTAL - training.part(1, 1), training.part(1, 1))


@pytest.mark.parametrize("algorithm", [local_sgd, diloco])
def test_a_joining_group_continues_at_the_position_of_the_others(algorithm: Callable[..., Any]) -> None:
    join = Gate()

    def let_it_join(rank: Rank) -> None:
        join.open()
        rank.cluster.wait_for_waiters(1)  # waits for the joining group before this group averages

    training = Training(algorithm, events={(0, PERIOD + 1): let_it_join})
    with Cluster() as cluster:
        first = cluster.start(training, group=0)
        cluster.wait(join)
        ended = results(first, cluster.start(training, group=1))
    assert agree(ended) == (TOTAL, 0)
    assert training.seen == {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}
    assert training.part(1, 0) == training.part(1, 1) == 0 and training.part(1, 2) > 0


def test_steps_outside_of_the_algorithm_are_refused_by_name() -> None:
    def loop(rank: Rank) -> str:
        model = make_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = rank.start_manager(load_state_dict=None, state_dict=None, use_async_quorum=False)
        loader = ElasticDataLoader(manager, dataset(), **SETTINGS)
        local_sgd(manager, model, inner)
        with pytest.raises(RuntimeError, match=r"steps are taken inside of `with LocalSGD\(...\)` only"):
            next(loader)
        return "refused"

    with Cluster() as cluster:
        assert results(cluster.start(loop, group=0)) == ["refused"]
