"""Groups that die in mid-step, and survivors that commit the very same step: no work is lost.

What is compared is the whole: the weights after a job with deaths, and those of one plain loop over the batches of the
groups that took part in each step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.cluster import Cluster, Rank, results
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper

STEPS = 7
WIDTH = 300  # 360 kB a layer, in buckets of 400 kB: two buckets
BUCKET_MB = 0.4
LR = 0.1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.middle(F.relu(self.first(x)))))


def batch(step: int, group: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + group)
    return torch.randn(4, WIDTH, generator=generator)


def new_model() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    generator = torch.Generator().manual_seed(0)  # of its own: threads share the global one
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.05, 0.05, generator=generator)
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def reference(participants: list[list[int]]) -> dict[str, torch.Tensor]:
    """One plain loop over the batches of those who took part in each step."""
    model, optimizer = new_model()
    for step, groups in enumerate(participants):
        optimizer.zero_grad()
        for group in groups:
            (model(batch(step, group)).square().mean() / len(groups)).backward()
        optimizer.step()
    return model.state_dict()


class Died(Exception):
    """The victim's loop ends here."""


@dataclass
class Outcome:
    """What one group's loop came to."""

    weights: dict[str, torch.Tensor]
    commits: list[bool]  # of each call of should_commit
    participants: list[list[int]]  # of each commit, from step 0 on
    batches: int


@dataclass
class Job:
    """Groups that train; some of them die at a step, at a place in it."""

    groups: int
    deaths: dict[int, tuple[int, str]] = field(default_factory=dict)  # group: step, place
    wrap: Callable[[Manager, nn.Module], nn.Module] = lambda manager, model: DistributedDataParallel(
        manager, model, bucket_cap_mb=BUCKET_MB
    )
    settings: dict[str, Any] = field(default_factory=dict)
    after_backward: Optional[Callable[[Manager, nn.Module], None]] = None
    steps: int = STEPS

    def __post_init__(self) -> None:
        self.started = threading.Barrier(self.groups)

    def loop(self, rank: Rank) -> Optional[Outcome]:
        model, inner = new_model()
        manager = rank.start_manager(
            load_state_dict=lambda s: (model.load_state_dict(s["model"]), inner.load_state_dict(s["optimizer"])),
            state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
            init_sync=False,
            **{"replay_failed_step": True, **self.settings},
        )
        optimizer = OptimizerWrapper(manager, inner)
        wrapped = self.wrap(manager, model)
        outcome = Outcome({}, [], [], 0)

        def note(step: int, committed: bool, participants: int) -> None:
            outcome.commits.append(committed)
            if committed:
                assert manager._plan is not None
                outcome.participants.append([int(i.split(":")[0][-1]) for i in manager._plan.replica_ids])

        manager.register_commit_hook(note)
        step_of_death, place = self.deaths.get(rank.group, (-1, ""))
        rank.cluster.wait_for_healthy(self.groups)
        self.started.wait(60)  # all begin with one quorum
        try:
            while manager.current_step() < self.steps:
                if manager.current_step() == step_of_death:
                    self.arm(rank, manager, place)
                optimizer.zero_grad()
                loss = wrapped(batch(manager.current_step(), rank.group)).square().mean()
                if rank.crashed:
                    raise Died
                loss.backward()
                if self.after_backward is not None:
                    self.after_backward(manager, model)
                if rank.crashed:
                    raise Died
                optimizer.step()
        except Exception:
            if rank.crashed:
                return None
            raise
        outcome.weights = {name: value.clone() for name, value in model.state_dict().items()}
        outcome.batches = manager.batches_committed()
        return outcome

    def arm(self, rank: Rank, manager: Manager, place: str) -> None:
        """Lets the rank die at a place in the step that begins."""
        if place == "forward":
            manager._pg.get_reconfigure_handle = lambda: (rank.crash(), "gone")[1]  # type: ignore[method-assign]
        elif place.startswith("bucket"):
            reduce, left = manager.allreduce, [int(place[len("bucket") :])]

            def allreduce(tensor: torch.Tensor, **more: Any) -> Any:
                if left[0] == 0:
                    rank.crash()
                left[0] -= 1
                return reduce(tensor, **more)

            manager.allreduce = allreduce  # type: ignore[method-assign]
        elif place == "commit":
            vote = manager._client.should_commit

            def should_commit(*args: Any, **more: Any) -> bool:
                vote(*args, **more)
                rank.crash()
                raise Died

            manager._client = cast(Any, _Instead(manager._client, should_commit=should_commit))
        else:
            raise ValueError(place)

    def run(self, cluster: Cluster) -> list[Outcome]:
        started = [cluster.start(self.loop, group) for group in range(self.groups)]
        return [outcome for outcome in results(*started) if outcome is not None]


class _Instead:
    """An object with some attributes replaced."""

    def __init__(self, inner: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def check(job: Job, outcomes: list[Outcome]) -> None:
    """All survivors committed every step at the first try, and hold what a plain loop over the participants gives."""
    assert len(outcomes) == job.groups - len(job.deaths)
    expected = reference(outcomes[0].participants)
    for outcome in outcomes:
        assert outcome.commits == [True] * job.steps, "a step was lost"
        assert outcome.participants == outcomes[0].participants
        assert outcome.batches == sum(len(groups) for groups in outcome.participants)
        for name, value in outcome.weights.items():
            torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
            assert torch.equal(value, outcomes[0].weights[name]), name


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(min_replicas=1, join_timeout_ms=5000) as built:
        yield built


@pytest.mark.parametrize("place", ["forward", "bucket0", "bucket1", "commit"])
@pytest.mark.parametrize("groups", [2, 3])
def test_a_death_in_mid_step_costs_no_step(cluster: Cluster, groups: int, place: str) -> None:
    job = Job(groups, deaths={0: (3, place)})  # the first one: its store is the primary's
    outcomes = job.run(cluster)
    check(job, outcomes)
    everybody, survivors = list(range(groups)), list(range(1, groups))
    with_victim = 4 if place == "commit" else 3  # it had reduced all there is: the others commit that
    assert outcomes[0].participants == [everybody] * with_victim + [survivors] * (STEPS - with_victim)
