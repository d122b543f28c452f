"""A flipped bit in the weights or optimizer state of a group is found by all groups, and healed if so
configured.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
import torch
from torch import nn

from tests.bounded import often
from tests.integration.cluster import DEADLINE, Cluster, Rank, records_of, results
from torchft._manager.checks.divergence import EXCHANGE, LEAST_SWEEP
from torchft._manager.checks.replicas import Diverged
from torchft.checkpointing.codec.digest import combine, digest, memory_of
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroup, ProcessGroupGloo

Wrap = Callable[[Manager, nn.Module], nn.Module]

GROUPS = 3
SWEEP = 5  # commits
FLIPS = max(2, often(20))
WITHIN = SWEEP + min(EXCHANGE, SWEEP)  # steps within which a difference is found


@dataclass(frozen=True)
class Flip:
    """A bit that flips between two steps."""

    step: int
    group: int
    tensor: int  # index into `Training.tensors`, modulo their number
    bit: int  # index of the bit, modulo their number


@dataclass
class Training:
    """Groups with equal training, which begin together, and bit flips in some of them."""

    flips: list[Flip]
    steps: int
    settings: dict[str, Any]
    groups: int = GROUPS
    wrap: Wrap = DistributedDataParallel
    device_of: Callable[[Rank], torch.device] = lambda rank: torch.device("cpu")
    make_pg: Callable[[int], ProcessGroup] = lambda group: ProcessGroupGloo(timeout=DEADLINE)
    # By group: the step in whose forward pass it crashes.
    crashes: dict[int, int] = field(default_factory=dict)
    flipped: dict[int, str] = field(default_factory=dict)  # by step: the name of the changed tensor
    ended: dict[int, int] = field(default_factory=dict)  # by group: the digest of its final state

    def loop(self, rank: Rank) -> Optional[Exception]:
        torch.manual_seed(0)
        device = self.device_of(rank)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        inner = torch.optim.Adam(model.parameters(), lr=0.01)
        manager = rank.start_manager(
            load_state_dict=lambda s: (
                model.load_state_dict(s["model"]),
                inner.load_state_dict(s["optimizer"]),
            ),
            state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
            **{"compare_commits": SWEEP, **self.settings},
        )
        wrapped = self.wrap(manager, model)
        optimizer = OptimizerWrapper(manager, inner)
        left = [flip for flip in self.flips if flip.group == rank.group]
        rank.cluster.wait_for_healthy(self.groups)
        while (step := manager.current_step()) < self.steps:
            while left and left[0].step <= step:
                self.flip(left.pop(0), model, inner, step)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + rank.group)
            loss = wrapped(torch.randn(4, 8, generator=generator).to(device)).square().mean()
            if self.crashes.get(rank.group) == step:
                manager.wait_quorum()  # the other groups expect this one in their reductions
                rank.crash()
                return None
            loss.backward()
            for p in model.parameters() if wrapped is model else ():
                assert p.grad is not None
                manager.allreduce(p.grad).wait()
            try:
                optimizer.step()
            except Diverged as e:
                rank.crash()
                return e
        self.ended[rank.group] = int(combine([digest(tensor) for _, tensor in self.tensors(model, inner)]))
        return None

    def tensors(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        parts = [*model.named_parameters()]
        state = [
            (f"{name}: {key}", optimizer.state[p][key])
            for name, p in parts
            for key in ("exp_avg", "exp_avg_sq")
        ]
        return [*parts, *state]

    def flip(self, flip: Flip, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        tensors = self.tensors(model, optimizer)
        name, tensor = tensors[flip.tensor % len(tensors)]
        memory = memory_of(tensor)
        bit = flip.bit % (8 * len(memory))
        memory[bit // 8] ^= 1 << bit % 8
        self.flipped[step] = name


@pytest.fixture
def reported() -> Iterator[list[Any]]:
    with records_of("torchft_divergences") as records:
        yield records


def run(training: Training) -> list[Any]:
    with Cluster(make_pg=training.make_pg) as cluster:
        loops = [cluster.start(training.loop, group) for group in range(training.groups)]
        return results(*loops)


def names(record: Any) -> list[str]:
    return [group.split(":")[0] for group in record.groups.split(", ")]


def test_equal_groups_report_no_difference(reported: list[Any]) -> None:
    training = Training([], steps=4 * SWEEP, settings={})
    run(training)
    assert reported == []
    assert len(set(training.ended.values())) == 1


SLOW = pytest.mark.slow


# A weight, a bias, and two tensors of the optimizer's state. The slow ones differ from the others in the
# tensor's place only, which test_flipped_bits_are_healed draws.
@pytest.mark.parametrize(
    "tensor", [pytest.param(0, marks=SLOW), pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW), 11]
)
def test_a_flipped_bit_is_named_by_all_groups(tensor: int, reported: list[Any]) -> None:
    training = Training([Flip(7, 1, tensor, 23)], steps=7 + WITHIN + 1, settings={})
    run(training)
    (name,) = training.flipped.values()
    first = {record.replica_id: record for record in reversed(reported)}
    assert len(first) == GROUPS
    for record in first.values():
        assert names(record) == ["group_1"]
        assert record.certain and name.split(":")[0] in record.tensors
        assert 7 <= record.digested_step < 7 + SWEEP and record.step <= 7 + WITHIN


def unwrapped(manager: Manager, model: nn.Module) -> nn.Module:
    return model


@pytest.mark.parametrize("wrap", [DistributedDataParallel, pytest.param(unwrapped, marks=SLOW)])
def test_flipped_bits_are_healed(wrap: Wrap, reported: list[Any]) -> None:
    """Bits of mantissas only: a NaN would be in the next average, and so in all groups."""
    choose, every = random.Random(1), WITHIN + 3
    bits = [32 * choose.randrange(1000) + choose.randrange(16, 23) for _ in range(FLIPS)]
    flips = [
        Flip(5 + every * i, choose.randrange(GROUPS), choose.randrange(12), bit) for i, bit in enumerate(bits)
    ]
    settings = {"on_divergence": "heal"}
    training = Training(flips, steps=5 + every * FLIPS + 1, settings=settings, wrap=wrap)
    run(training)
    assert len(set(training.ended.values())) == 1
    for flip in flips:
        found = {(*names(r), r.certain) for r in reported if flip.step <= r.digested_step < flip.step + SWEEP}
        assert found == {(f"group_{flip.group}", True)}, flip


# In the slow cases the other group does not fail in the step that finds the difference. For that,
# tests/integration/test_replay.py has such failures, and test_flipped_bits_are_healed such differences.
@pytest.mark.parametrize("crash", [pytest.param(8, marks=SLOW), 10, pytest.param(11, marks=SLOW)])
def test_with_replay_a_group_heals_while_another_fails(crash: int, reported: list[Any]) -> None:
    """Of four groups one differs from step 7 on. Another one fails at, just before, or just after step 10,
    which finds the difference.
    """
    settings = {"on_divergence": "heal", "replay_failed_step": True}
    training = Training(
        [Flip(7, 1, 0, 20)], steps=7 + 2 * WITHIN, settings=settings, groups=4, crashes={3: crash}
    )
    run(training)
    assert len(training.ended) == 3 and len(set(training.ended.values())) == 1
    assert {(*names(record), record.certain) for record in reported} == {("group_1", True)}


def test_of_two_groups_the_second_heals(reported: list[Any]) -> None:
    training = Training(
        [Flip(7, 0, 0, 23)], steps=7 + WITHIN + 2, settings={"on_divergence": "heal"}, groups=2
    )
    run(training)
    assert len(set(training.ended.values())) == 1
    assert {(*names(record), record.certain) for record in reported} == {("group_0", "group_1", False)}


def test_an_evicted_group_ends(reported: list[Any]) -> None:
    training = Training([Flip(7, 2, 0, 23)], steps=7 + WITHIN + 5, settings={"on_divergence": "evict"})
    errors = run(training)
    assert [type(error) for error in errors] == [type(None), type(None), Diverged]
    assert "group_2" in str(errors[2]) and "0.weight" in str(errors[2])
    assert training.ended.keys() == {0, 1}


class _Own(ProcessGroupGloo):
    """A user's own process group class, derived from one of torchft."""


@pytest.mark.parametrize("make_pg", [ProcessGroupGloo, _Own])
def test_default_of_compare_commits(make_pg: Any, reported: list[Any]) -> None:
    training = Training(
        [Flip(7, 1, 0, 23)],
        steps=7 + LEAST_SWEEP + EXCHANGE + 1,
        settings={"compare_commits": None},
        make_pg=lambda group: make_pg(timeout=DEADLINE),
    )
    run(training)
    assert {names(record)[0] for record in reported} == {"group_1"}


@pytest.mark.parametrize("others", [{"compare_commits": 0}, {"compare_commits": 20}])
def test_groups_with_other_settings_train_together(others: dict[str, Any], reported: list[Any]) -> None:
    training = Training([Flip(7, 1, 0, 23)], steps=7 + WITHIN + 5, settings={}, groups=2)
    other = Training([], steps=training.steps, settings=others, groups=2)
    with Cluster() as cluster:
        results(cluster.start(other.loop, 0), cluster.start(training.loop, 1))
    assert reported == []
