"""A group whose gradients are wrong is named by an audit, and ends; the others end with the right weights."""

from __future__ import annotations

import copy
import json
import random
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import torchft
from tests.integration.cluster import Cluster, Rank, records_of, results
from torchft._manager.checks.audits import CorruptedGradient
from torchft._manager.poison import digest
from torchft.cli import events

SAMPLES = 96
SETTINGS: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, seed=3, epochs=1)
STEPS = 8

# No dropout: threads share a generator of random numbers (tests/unit/manager/test_audits.py has one).
_MODEL = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass
class Fault:
    """Flips a bit of a gradient in one group, in some steps."""

    group: int
    steps: range = range(3, STEPS)
    bit: int = 1  # the last one
    often: float = 1.0  # probability in a backward pass


@dataclass
class Loop:
    """A user's script, as a thread of each group."""

    groups: int
    audit: float = 1.0
    fault: Optional[Fault] = None
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the Manager
    rates: dict[int, float] = field(default_factory=dict)  # of a group that differs
    audited: dict[int, int] = field(default_factory=dict)  # steps with a unit more than usual, by group

    def __call__(self, rank: Rank) -> Any:
        group = rank.group
        audit = self.rates.get(group, self.audit)
        job = torchft.Job(manager=rank.start_manager(audit=audit, **self.settings), device="cpu")
        net = copy.deepcopy(_MODEL)
        fault = self.fault if self.fault is not None and self.fault.group == group else None
        if fault is not None:
            rng = random.Random(1)

            def corrupt(gradient: torch.Tensor) -> torch.Tensor:
                if job.step not in fault.steps or rng.random() >= fault.often:
                    return gradient
                wrong = gradient.clone()
                wrong.view(torch.int64)[0] ^= fault.bit
                return wrong

            net[3].bias.register_hook(corrupt)
        model, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
        data = job.loader(TensorDataset(x, x.sum(1, keepdim=True).tanh()), **SETTINGS)
        rank.cluster.wait_for_healthy(self.groups)
        for step in data:
            for x_unit, y in step:
                unit = step._unit
                assert unit is not None
                self.audited[group] = self.audited.get(group, 0) + unit.audit
                step.backward(nn.functional.mse_loss(model(x_unit), y))
            try:
                step.commit()
            except CorruptedGradient as e:
                rank.crash()
                return e
        return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.fixture
def findings() -> Iterator[list[Any]]:
    with records_of("torchft_audits") as records:
        yield records


def run(loop: Loop) -> tuple[list[Any], list[dict[str, Any]], str]:
    """Returns how the groups end, the events of audits, and the lighthouse's metrics."""
    with Cluster(min_replicas=1) as cluster:
        ended = results(*(cluster.start(loop, group) for group in range(loop.groups)))
        at = cluster.lighthouse.address()
        with urllib.request.urlopen(f"{at}/api/v1/history", timeout=10) as response:
            history = [e for e in json.load(response)["events"] if e["kind"] == "corrupted"]
        with urllib.request.urlopen(f"{at}/metrics", timeout=10) as response:
            return ended, history, response.read().decode()


def clean(**settings: Any) -> torch.Tensor:
    """The weights of one group without faults and audits."""
    (weights,) = run(Loop(1, audit=0.0, settings=settings))[0]
    return weights


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("rate", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
def test_an_audit_changes_nothing(
    reproducible: bool, rate: float, deterministic: None, findings: Any
) -> None:
    settings = {"reproducible_reduction": reproducible}
    loop = Loop(3, audit=rate, settings=settings)
    ended, history, metrics = run(loop)
    expected = clean(**settings)
    for weights in ended:
        if reproducible:
            assert torch.equal(weights, expected)
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
    assert history == [] and findings == []
    assert 'torchft_corrupted_gradients_total{training_job="default"} 0' in metrics
    # In an audited step, all groups but the one that counts the unit have one more.
    assert sum(loop.audited.values()) == 2 * rate * STEPS


@pytest.mark.parametrize(
    ("often", "replay"),
    [(1.0, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1.0, True), (0.3, False)))],
)
def test_a_group_whose_gradient_has_a_flipped_bit_is_named_and_ends(
    often: float, replay: bool, deterministic: None, findings: Any
) -> None:
    """With replays, too: what the wrong group has computed must not count in the next attempt."""
    settings = {"replay_failed_step": replay}
    ended, history, metrics = run(Loop(3, fault=Fault(group=1, often=often), settings=settings))

    error = ended[1]
    assert isinstance(error, CorruptedGradient)
    assert "the gradient of group_1:" in str(error) and "(rank 0 on " in str(error)
    assert "is not that of most groups" in str(error)
    assert digest(error, 3) is None, "it is no exception of data or code, which stops the job"
    expected = clean()
    for weights in (ended[0], ended[2]):
        if often == 1.0:  # else it has committed some that no audit has met
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
        assert torch.equal(weights, ended[0])
    (event,) = history
    assert [name.split(":")[0] for name in event["left"]] == ["group_1"]
    assert events.words(event).endswith(event["reason"]) and "samples " in event["reason"]
    assert 'torchft_corrupted_gradients_total{training_job="default"} 1' in metrics
    assert {record.groups.split(":")[0] for record in findings} == {"group_1"}
    assert all(record.certain for record in findings)


def test_without_deterministic_kernels_gradients_are_compared_by_a_bound(findings: Any) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    small = run(Loop(3, fault=Fault(group=1)))
    assert all(isinstance(weights, torch.Tensor) for weights in small[0]) and small[1] == []
    ended, history, _ = run(Loop(3, fault=Fault(group=2, bit=1 << 58)))
    assert isinstance(ended[2], CorruptedGradient)
    assert all(isinstance(weights, torch.Tensor) for weights in ended[:2])
    assert len(history) == 1


def test_of_two_groups_both_are_named_and_none_ends(deterministic: None, findings: Any) -> None:
    ended, history, _ = run(Loop(2, fault=Fault(group=1, steps=range(4, 5))))
    assert all(isinstance(weights, torch.Tensor) for weights in ended)
    assert len(history) == 3, "the step is made again twice"
    for event in history:
        assert [name.split(":")[0] for name in event["left"]] == ["group_0", "group_1"]
        assert "no majority shows which is right" in event["reason"]
    assert "the step is committed (attempt 3 of 3)" in history[-1]["reason"]
    assert not any(record.certain for record in findings)


def test_the_rank_of_a_group_is_named(deterministic: None, findings: Any) -> None:
    """Each rank is compared with its counterparts; the other rank of its group ends with it."""

    def loop(rank: Rank) -> Any:
        net = nn.Linear(3, 1).double()
        manager = rank.start_manager(
            audit=0.5, load_state_dict=net.load_state_dict, state_dict=net.state_dict
        )
        model = torchft.DistributedDataParallel(manager, net)
        optimizer = torchft.Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.05))
        data = TensorDataset(torch.ones(72, 3, dtype=torch.float64))
        loader = torchft.data.ElasticDataLoader(
            manager, data, global_batch_size=12, micro_batch_size=1, reproducible_rng=True
        )
        if (rank.group, rank.rank) == (1, 1):
            net.weight.register_hook(lambda gradient: gradient * (1 + 2**-50))
        rank.cluster.wait_for_healthy(3)
        for step in loader:
            optimizer.zero_grad()
            for unit in step:
                with unit.accumulate(model):
                    (model(unit.data[0]).mean() * unit.weight).backward()
            try:
                optimizer.step()
            except CorruptedGradient as e:
                rank.crash()
                return e
        return manager.current_step()

    with Cluster(min_replicas=1) as cluster:
        groups = [cluster.start(loop, group, world_size=2) for group in range(3)]
        assert results(groups[0], groups[2]) == [6] * 4
        first, second = groups[1]
        error = second.result(timeout=90)
        assert isinstance(error, CorruptedGradient) and "(rank 1 on " in str(error)
        with pytest.raises(Exception, match="rank 1"):
            first.result(timeout=90)
    assert {(record.rank, record.groups.split(":")[0]) for record in findings} == {(1, "group_1")}


def test_a_group_that_is_alone_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    ended, history, _ = run(Loop(1))
    assert isinstance(ended[0], torch.Tensor) and history == []
    assert caplog.text.count("gradients are not compared: one group takes part") == 1


def test_groups_with_another_rate_or_none_train_without_audits(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(2, rates={1: 0.0}, fault=Fault(group=1))
    ended, history, _ = run(loop)
    assert all(isinstance(weights, torch.Tensor) for weights in ended) and history == []
    assert sum(loop.audited.values()) == 0
    assert "gradients are not compared: group_1:" in caplog.text


def test_what_no_audit_can_compute_again_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

    data = TensorDataset(torch.ones(8, 2))

    def refused(rank: Rank) -> None:
        manager = rank.start_manager(audit=0.5)
        with pytest.raises(ValueError, match="audit needs an ElasticDataLoader"):
            manager.start_quorum()
        sizes: dict[str, Any] = dict(global_batch_size=4, micro_batch_size=2)
        with pytest.raises(ValueError, match=r"audit=0.5 needs units that any group computes alike"):
            torchft.data.ElasticDataLoader(manager, data, **sizes)
        with pytest.raises(ValueError, match=r"audit=0.5 needs units that any group computes alike"):
            torchft.data.ElasticDataLoader(manager, Stream(), shuffle=False, **sizes)
        loader = torchft.data.ElasticDataLoader(manager, data, reproducible_rng=True, **sizes)
        with pytest.raises(ValueError, match="LocalSGD and DiLoCo"):
            loader.steps_by_itself(None)  # type: ignore[arg-type]
        manager.report_error(RuntimeError("over"))

    with Cluster(min_replicas=1) as cluster:
        results(cluster.start(refused, 0))
