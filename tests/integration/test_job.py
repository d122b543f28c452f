"""A loop of `torchft.Job`: the weights of one process, whatever fails, and a named error for a mistake."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.distributed import Work
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset, TensorDataset

import torchft
from tests.integration.cluster import Cluster, Gate, Rank, crash_and_wait, results
from torchft._job.parameters import average_in_group, check_scaler, is_stage, reduce_plain
from torchft._security import RUN_ENV
from torchft.data.position import DataPlan, DataPosition
from torchft.job import JobStep
from torchft.manager import JobFinished
from torchft.work import _DummyWork

SAMPLES = 41  # a multiple of neither batch nor unit
SETTINGS: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, seed=3, epochs=2)
STEPS = 8

_MODEL = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    net = copy.deepcopy(_MODEL)
    adam = torch.optim.Adam(net.parameters(), lr=0.05)
    return net, adam, torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)


def one_process(clip: Optional[float] = None) -> tuple[torch.Tensor, list[float]]:
    """Trains on whole batches with PyTorch only; returns the weights, and the loss of each step."""
    plan, data, (net, adam, schedule) = DataPlan(SAMPLES, **SETTINGS), dataset(), parts()
    position, losses = DataPosition(), []
    while position != plan.end:
        indices = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
        adam.zero_grad()
        loss = nn.functional.mse_loss(net(data.tensors[0][indices]), data.tensors[1][indices])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        adam.step()
        schedule.step()
        losses.append(loss.item())
        position = plan.advance(position)
    return flat(net), losses


@dataclass
class Loop:
    """A user's script, as a thread of each group."""

    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the Manager
    job: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    clip: Optional[float] = None
    start_with: int = 1
    # Called in a step before its batches, by (group, committed steps); True ends the loop as a crash.
    events: dict[tuple[int, int], Callable[[Rank], bool]] = field(default_factory=dict)
    body: Optional[Callable[[JobStep, nn.Module], None]] = None  # in place of the batches and commit
    losses: dict[int, set[float]] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        job = torchft.Job(manager=rank.start_manager(**self.settings), device="cpu", **self.job)
        net, adam, schedule = parts()
        model, _, _ = job.prepare(net, adam, schedule)
        data = job.loader(dataset(), **{**SETTINGS, **self.loader})
        rank.cluster.wait_for_healthy(self.start_with)
        for step in data:
            event = self.events.pop((rank.group, job.step), None)
            if event is not None and event(rank):
                return None
            if self.body is not None:
                self.body(step, model)
                continue
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            if self.clip is not None:
                assert step.clip(self.clip).numel() == 1
            number = job.step
            if step.commit():
                self.losses.setdefault(number, set()).add(step.loss)
        return flat(net)


def test_groups_end_with_the_weights_and_the_losses_of_one_process() -> None:
    loop = Loop(clip=0.5, start_with=2)
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(loop, group) for group in range(2)))

    weights, losses = one_process(clip=0.5)
    for each in ended:
        torch.testing.assert_close(each, weights, rtol=1e-9, atol=1e-12)
    assert [max(loop.losses[step]) for step in range(STEPS)] == pytest.approx(losses, rel=1e-9)
    assert all(len(same) == 1 for same in loop.losses.values()), "all groups know the same mean"


@pytest.mark.parametrize(("heal", "replay"), [("at_once", True), ("in_passing", False), ("in_passing", True)])
def test_a_group_that_fails_and_returns_changes_no_weight(heal: str, replay: bool) -> None:
    returned, crash, wait = crash_and_wait()
    settings = {"heal": heal, "replay_failed_step": replay}
    loop = Loop(settings=settings, start_with=2, events={(1, 2): crash, (0, 5): wait})
    with Cluster(min_replicas=1) as cluster:
        groups = [cluster.start(loop, group) for group in range(2)]
        cluster.wait(returned)
        loop.start_with = 1
        again = cluster.start(loop, 1)
        ended = results(groups[0], again)

    weights, losses = one_process()
    for each in ended:
        torch.testing.assert_close(each, weights, rtol=1e-9, atol=1e-12)
    assert [max(loop.losses[step]) for step in range(STEPS)] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("feature", ["activation checkpointing", "autocast"])
def test_features_of_pytorch_survive_a_failure(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    returned, crash, wait = crash_and_wait()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = copy.deepcopy(_MODEL)

        def forward(self, x: torch.Tensor) -> Any:
            if feature == "autocast":  # which leaves float64 alone
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    made = self.layers(x.float())
                assert made.dtype == torch.bfloat16
                return made.double()
            return checkpoint(self.layers, x, use_reentrant=False)

    def net_of(made: nn.Module) -> Callable[[], Any]:
        def of() -> Any:
            net = copy.deepcopy(made)
            adam = torch.optim.Adam(net.parameters(), lr=0.05)
            return net, adam, torch.optim.lr_scheduler.StepLR(adam, 2, 0.5)

        return of

    monkeypatch.setattr(
        sys.modules[__name__], "parts", net_of(Model().float() if feature == "autocast" else Model())
    )
    loop = Loop(start_with=2, events={(1, 2): crash, (0, 5): wait})
    with Cluster(min_replicas=1) as cluster:
        groups = [cluster.start(loop, group) for group in range(2)]
        cluster.wait(returned)
        loop.start_with = 1
        ended = results(groups[0], cluster.start(loop, 1))
    weights, _ = one_process()
    exact = feature != "autocast"  # the gradients of micro-batches are rounded before they are added
    for each in ended:
        torch.testing.assert_close(each, weights, rtol=1e-9 if exact else 0.1, atol=1e-12 if exact else 0.05)
    assert torch.equal(*ended)


def test_what_a_group_of_several_ranks_cannot_reduce_is_refused() -> None:
    class Sharded(nn.Linear):
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchft._job.parameters.FSDPModule", Sharded)
        with pytest.raises(ValueError, match="sees the infinities of its own shard only"):
            check_scaler(torch.amp.GradScaler("cpu"), [nn.Sequential(), Sharded(1, 1)], 2)
        check_scaler(torch.amp.GradScaler("cpu"), [Sharded(1, 1)], 1)
        check_scaler(None, [Sharded(1, 1)], 2)
        stage = PipelineStage.__new__(PipelineStage)
        stage.submod = nn.Sequential(Sharded(1, 1))
        with pytest.raises(ValueError, match="in each call of the schedule"):
            is_stage(stage)
        stage.submod = nn.Sequential(nn.Linear(1, 1))
        assert is_stage(stage)


def crash(rank: Rank) -> bool:
    rank.crash()
    return True


@pytest.mark.parametrize("saved", [False, True])
def test_a_group_that_returns_after_the_end_makes_no_step(
    saved: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the checkpoint of the last step it ends as the others do, so that its script goes on behind the
    loop. Otherwise its process ends. The next run of the job trains.
    """
    loop = Loop(start_with=2, events={(1, 2): crash})
    if saved:
        loop.job = {"checkpoint_dir": tmp_path, "checkpoint_every": 100}
    again = copy.copy(loop)
    again.start_with, again.events = 0, {(1, step): crash for step in range(STEPS)}
    weights, _ = one_process()
    monkeypatch.setenv(RUN_ENV, f"first-{saved}")
    with Cluster(min_replicas=1) as cluster:
        ended = results(*(cluster.start(loop, group) for group in range(2)))
        torch.testing.assert_close(ended[0], weights, rtol=1e-9, atol=1e-12)
        returns = cluster.start(again, 1)
        if saved:
            torch.testing.assert_close(results(returns)[0], weights, rtol=1e-9, atol=1e-12)
        else:
            with pytest.raises(JobFinished) as e:
                results(returns)
            assert e.value.code == 0 and f"it was complete at step {STEPS}, before" in e.value.reason
        assert len(again.events) == STEPS, "it made no step"
        assert caplog.text.count("this group trains nothing: ") == 1

        monkeypatch.setenv(RUN_ENV, f"second-{saved}")
        loop.start_with, loop.job = 1, {}
        torch.testing.assert_close(results(cluster.start(loop, 0))[0], weights, rtol=1e-9, atol=1e-12)


def test_a_script_may_train_twice_in_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second training begins at step 0 after the end of the first: no late group of that."""
    monkeypatch.setenv(RUN_ENV, "run")
    weights, _ = one_process()
    with Cluster(min_replicas=1) as cluster:
        for _ in range(2):
            loop = Loop()
            torch.testing.assert_close(results(cluster.start(loop, 0))[0], weights, rtol=1e-9, atol=1e-12)
            assert len(loop.losses) == STEPS


def test_with_reproducible_sums_weights_and_losses_have_the_same_bits_with_one_group_and_two() -> None:
    ends = []
    for number in (1, 2):
        loop = Loop(settings={"reproducible_reduction": True}, start_with=number)
        with Cluster(min_replicas=number) as cluster:
            ended = results(*(cluster.start(loop, group) for group in range(number)))
        ends += [(flat.tolist(), loop.losses) for flat in ended if flat is not None]
    assert len(ends) == 3
    assert ends[0] == ends[1] == ends[2]
    assert [max(ends[0][1][step]) for step in range(STEPS)] == pytest.approx(one_process()[1], rel=1e-5)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_losses_are_reduced_with_the_gradients(dtype: torch.dtype, reproducible: bool) -> None:
    def loop(rank: Rank) -> tuple[list[int], list[float], list[float]]:
        manager = rank.start_manager(reproducible_reduction=reproducible, compare_commits=0)
        job = torchft.Job(manager=manager, device="cpu")
        first, second = nn.Linear(4, 3).to(dtype), nn.Linear(3, 1).to(dtype)
        adam = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
        one, two, _ = job.prepare(first, second, adam)
        sizes, means, expected = list[int](), list[float](), list[float]()
        reduce = manager.allreduce

        def allreduce(tensor: torch.Tensor, **more: Any) -> Any:
            sizes.append(tensor.numel())
            return reduce(tensor, **more)

        manager.allreduce = allreduce  # type: ignore[method-assign]
        for step in job.loader(dataset(), **{**SETTINGS, "epochs": 1}):
            losses: dict[float, float] = {}  # of each batch, which may come again (`reproducible`)
            sizes.clear()
            for x, y in step:
                loss = nn.functional.mse_loss(two(one(x.to(dtype)).tanh()), y.to(dtype))
                losses[float(x.sum())] = float(loss.detach() * step.weight)
                step.backward(loss)
            for module in (first, second):
                assert module.weight.grad.data_ptr() % 64 == 0
            step.commit()
            means.append(step.loss)
            expected.append(sum(losses.values()))
        return sizes, means, expected

    with Cluster() as cluster:
        ((sizes, means, expected),) = results(cluster.start(loop, 0))
    assert len(means) == 4
    assert means == pytest.approx(expected, rel=1e-6 if dtype != torch.float64 or reproducible else 1e-12)
    # two models, or the integers of both; a sum of losses in bfloat16 would be of no use
    alone = dtype is torch.bfloat16 and not reproducible
    assert len(sizes) == (1 if reproducible else 3 if alone else 2)


def test_a_stream_needs_no_settings() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(dataset().tensors[0])

    def loop(rank: Rank) -> int:
        job = torchft.Job(manager=rank.start_manager(), device="cpu")
        net = nn.Linear(4, 1).double()
        model, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        samples = 0
        for step in job.loader(Stream(), global_batch_size=12, micro_batch_size=2):
            for x in step:
                samples += len(x) if step.weight else 0  # else a copy, for a rank without data
                step.backward(model(x).square().mean())
            step.commit()
        return samples

    with Cluster() as cluster:
        assert results(cluster.start(loop, 0)) == [SAMPLES]


def body(name: str) -> Callable[[JobStep, nn.Module], None]:
    """A mistake of a script, by name."""

    def run(step: JobStep, model: nn.Module) -> None:
        if name == "never ended":
            return
        if name == "backward outside":
            step.backward(torch.ones(1, requires_grad=True))
        for x, y in step:
            if name == "no backward":
                continue
            if name == "None":
                step.backward(None)  # type: ignore[arg-type]
            loss = nn.functional.mse_loss(model(x), y)
            if name == "not a scalar":
                step.backward(loss.repeat(2))
            if name == "raises":
                raise KeyError("label")
            step.backward(loss)
            if name == "clips a batch":
                step.clip(1.0)
            if name == "commits a batch" and step._unit.last:
                step.commit()
            if name == "left early":
                break
            if name == "backward twice":
                step.backward(model(x).sum())
            if name == "early loss":
                step.loss  # noqa: B018
        step.commit()
        if name == "twice":
            step.commit()

    return run


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        ("never ended", RuntimeError, r"step 1 was not ended: call step.commit\(\)"),
        ("backward outside", RuntimeError, "belongs into `for batch in step`"),
        ("no backward", RuntimeError, r"a batch had no backward pass: call step.backward\(loss\)"),
        ("None", TypeError, "loss is None: it has to be a tensor of one element"),
        ("not a scalar", TypeError, r"loss is a tensor of shape \(2,\)"),
        ("raises", KeyError, "label"),
        ("backward twice", RuntimeError, r"step.backward\(\) was called twice for a batch"),
        ("early loss", RuntimeError, "step.loss belongs after `for batch in step`, run to its end"),
        ("twice", RuntimeError, "called twice"),
        ("clips a batch", RuntimeError, r"step.clip\(\) belongs after `for batch in step`"),
        ("commits a batch", RuntimeError, r"step.commit\(\) belongs after `for batch in step`"),
        ("left early", RuntimeError, r"step.commit\(\) belongs after .*, run to its end"),
    ],
)
def test_a_mistake_of_the_loop_is_named(mistake: str, error: type[Exception], text: str) -> None:
    with Cluster() as cluster:
        (loop,) = cluster.start(Loop(body=body(mistake)), 0)
        with pytest.raises(error, match=text):
            loop.result(timeout=60)


def mistakes(job: torchft.Job, name: str) -> None:
    """A mistake before the loop, by name."""
    net, adam, schedule = parts()
    batches: dict[str, Any] = dict(global_batch_size=4, micro_batch_size=2)
    if name == "no model":
        job.prepare(adam)
    elif name == "not in an optimizer":
        job.prepare(net, torch.optim.SGD(net[0].parameters(), 0.1))
    elif name == "not in a model":
        other = nn.Linear(1, 1)
        job.prepare(net, torch.optim.SGD([*net.parameters(), *other.parameters()], 0.1))
    elif name == "no state":
        job.prepare(net, adam, object())
    elif name == "name taken":
        job.state("model", schedule)
    elif name == "reduces by itself":
        job.prepare(torchft.DistributedDataParallel(job.manager, net), adam)
    elif name == "votes by itself":
        job.prepare(net, torchft.Optimizer(job.manager, adam))
    elif name == "two scalers":
        job.prepare(torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu"))
    else:
        job.prepare(net, adam)
        job.loader(dataset(), **batches)
        if name == "late":
            job.prepare(schedule)
    job.loader(dataset(), **batches)


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        ("no model", ValueError, "no model or no optimizer"),
        (
            "not in an optimizer",
            ValueError,
            r"parameter 2.weight of Sequential is in no optimizer.*job.state",
        ),
        ("not in a model", ValueError, r"Adam|SGD has a parameter of shape \(1, 1\) that is in no model"),
        ("no state", TypeError, "object.* has no state_dict"),
        ("name taken", ValueError, "name='model' is taken"),
        ("reduces by itself", ValueError, "given DistributedDataParallel, which reduces"),
        ("votes by itself", ValueError, "given OptimizerWrapper, which votes"),
        ("two scalers", ValueError, "a GradScaler was given already"),
        ("two loops", ValueError, "a loop already"),
        ("late", ValueError, r"prepare\(\) comes before loader\(\)"),
    ],
)
def test_a_mistake_before_the_loop_is_named(mistake: str, error: type[Exception], text: str) -> None:
    def loop(rank: Rank) -> None:
        mistakes(torchft.Job(manager=rank.start_manager(), device="cpu"), mistake)

    with Cluster() as cluster:
        (ended,) = cluster.start(loop, 0)
        with pytest.raises(error, match=text):
            ended.result(timeout=60)


def test_a_scaler_that_finds_infinities_gets_the_batch_again() -> None:
    def loop(rank: Rank) -> tuple[list[bool], float, float]:
        job = torchft.Job(manager=rank.start_manager(), device="cpu")
        net = nn.Linear(4, 1).double()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=10**6)
        model, _, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), scaler)
        committed, infinite = [], True
        for step in job.loader(dataset(), **{**SETTINGS, "epochs": 1}):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss * float("inf") if infinite else loss)
            norm = step.clip(1e9)
            assert bool(norm.isfinite()) is not infinite
            infinite = False
            committed.append(step.commit())
        return committed, scaler.get_scale(), float(flat(net).abs().max())

    with Cluster() as cluster:
        ((committed, scale, largest),) = results(cluster.start(loop, 0))
    assert committed == [False, True, True, True, True]
    assert scale == 2.0**39
    assert largest < 10


def test_groups_of_which_one_finds_infinities_in_a_failed_step_have_one_scale() -> None:
    def loop(rank: Rank) -> tuple[float, torch.Tensor]:
        job = torchft.Job(manager=rank.start_manager(), device="cpu")
        net = copy.deepcopy(_MODEL)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)
        model, _, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), scaler)
        data = job.loader(dataset(), **{**SETTINGS, "epochs": 1})
        rank.cluster.wait_for_healthy(2)
        fails = True
        for step in data:
            if job.step == 2 and fails and rank.group == 1:
                job.manager.report_error(RuntimeError("a failure"))  # so no group gets the sum
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss * float("inf") if job.step == 2 and fails and rank.group == 0 else loss)
            fails = fails and job.step != 2
            step.commit()
        return scaler.get_scale(), flat(net)

    with Cluster(min_replicas=2) as cluster:
        (one, weights), (other, others) = results(*(cluster.start(loop, group) for group in range(2)))
    assert one == other
    assert torch.equal(weights, others)


@pytest.mark.parametrize("clips", [False, True])
def test_a_group_that_heals_in_a_step_unscales_with_the_scale_of_the_others(clips: bool) -> None:
    def loop(rank: Rank) -> tuple[float, torch.Tensor]:
        heals = rank.group == 1
        job = torchft.Job(manager=rank.start_manager(heal="at_once"), device="cpu")
        net = copy.deepcopy(_MODEL)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0 if heals else 512.0, growth_interval=10**6)
        model, _, _ = job.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), scaler)
        data = job.loader(dataset(), **SETTINGS)
        for step in data:
            if job.step == 3 and not heals:
                started.open()
                rank.cluster.wait_for_waiters(1)
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            if clips:
                step.clip(1e9)
            step.commit()
        return scaler.get_scale(), flat(net)

    started = Gate()
    with Cluster(min_replicas=1) as cluster:
        group = cluster.start(loop, 0)
        cluster.wait(started)
        (one, weights), (other, others) = results(group, cluster.start(loop, 1))
    assert one == other == 512.0
    assert torch.equal(weights, others)


def test_infinities_in_the_gradients_of_one_optimizer_are_a_batch_for_none() -> None:
    def loop(rank: Rank) -> tuple[list[bool], list[torch.Tensor], float]:
        job = torchft.Job(manager=rank.start_manager(), device="cpu")
        first, second = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=10**6)
        sgd = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (first, second)]
        one, two, *_ = job.prepare(first, second, *sgd, scaler)
        committed, infinite, changes = [], True, []
        for step in job.loader(dataset(), **{**SETTINGS, "epochs": 1}):
            before = flat(first), flat(second)
            for x, y in step:
                between = one(x)
                if infinite:
                    between.register_hook(lambda gradient: gradient * float("inf"))
                step.backward(nn.functional.mse_loss(two(torch.tanh(between)), y))
            infinite = False
            committed.append(step.commit())
            changes += [(flat(net) - old).abs().sum() for net, old in zip((first, second), before)]
        return committed, changes, scaler.get_scale()

    with Cluster() as cluster:
        ((committed, changes, scale),) = results(cluster.start(loop, 0))
    assert committed == [False, True, True, True, True]
    assert [float(change) > 0 for change in changes] == [False] * 2 + [True] * 8
    assert scale == 2.0


@dataclass
class Count:
    """Stands for an average of the weights, which a loop updates after each commit."""

    steps: int = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_a_loop_that_reduces_gradients_by_itself_is_refused() -> None:
    def loop(rank: Rank) -> None:
        job = torchft.Job(manager=rank.start_manager(replay_failed_step=True), device="cpu")
        net, adam, schedule = parts()
        model, _, _ = job.prepare(net, adam, schedule)
        for step in job.loader(dataset(), **SETTINGS):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            count = torch.ones(1)
            job.manager.allreduce(count).wait()  # another tensor is nobody's business
            if job.step == 1:
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    job.manager.allreduce(parameter.grad).wait()
            step.commit()

    with Cluster() as cluster:
        (ended,) = cluster.start(loop, 0)
        with pytest.raises(RuntimeError, match="reduced gradients that the job has reduced"):
            ended.result(timeout=60)


class Peers:
    """The group of a rank whose peer has the same gradients, or a Manager with another group."""

    def __init__(self) -> None:
        self.calls: list[list[torch.Tensor]] = []

    def size(self) -> int:
        return 2

    def allreduce(self, given: Any) -> Work:
        self.calls.append(given if isinstance(given, list) else [given])
        for tensor in self.calls[-1]:
            tensor *= 2
        return _DummyWork(given)

    allreduce_coalesced = allreduce


def with_gradients() -> nn.Module:
    """Parameters of two dtypes, one without a gradient, one with a sparse one; gradients are 1."""
    net = nn.Sequential(
        nn.Linear(4, 3), nn.Linear(3, 1).double(), nn.Linear(1, 1), nn.Embedding(2, 2, sparse=True)
    )
    for p in [*net[0].parameters(), *net[1].parameters(), net[2].weight]:
        p.grad = torch.ones_like(p)
    net[3](torch.tensor([0, 1])).sum().backward()
    return net


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad.to_dense() for p in net.parameters() if p.grad is not None]


def test_gradients_of_one_dtype_are_averaged_in_one_collective_of_a_group() -> None:
    net, group = with_gradients(), Peers()
    own = [p.grad for p in net.parameters() if p.grad is not None]
    average_in_group(net.parameters(), group)  # type: ignore[arg-type]
    assert [len(tensors) for tensors in group.calls] == [3, 2, 1]
    assert all(gradient.eq(1).all() for gradient in gradients(net))
    assert all(p.grad is given for p, given in zip((p for p in net.parameters() if p.grad is not None), own))


def test_gradients_of_one_dtype_are_summed_in_one_collective_of_the_groups() -> None:
    net, manager = with_gradients(), Peers()
    reduce_plain([net], manager)  # type: ignore[arg-type]
    assert [tensors[0].numel() for tensors in manager.calls] == [16, 4, 4]
    assert all(gradient.eq(2).all() for gradient in gradients(net))
    assert [p.grad.shape for p in net.parameters() if p.grad is not None] == [
        p.shape for p in net.parameters() if p.grad is not None
    ]
    packed = manager.calls[0][0]
    assert net[0].weight.grad.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()  # no copy
