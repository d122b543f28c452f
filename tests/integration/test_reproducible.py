"""reproducible_reduction: groups that fail, join and lose steps end with exactly the bits of one process."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn

from tests.integration.cluster import DEADLINE, Cluster, Rank, results
from tests.integration.test_loader import (
    LAST,
    SAMPLES,
    SETTINGS,
    ConnectsAtOnce,
    Training,
    check,
    dataset,
    ends_of_a_failure_and_a_join,
    flat,
    make_model,
    make_optimizer,
    refused,
    wrapped_by_pytorch,
    wrapped_by_torchft,
    wrapped_one_by_one,
)
from torchft import Optimizer
from torchft.data import ElasticDataLoader
from torchft.data._step import UnitsSkipped
from torchft.data.exact_sum import ExactSum
from torchft.data.position import DataPlan, DataPosition, SamplesDiffer
from torchft.manager import Manager, WorldSizeMode
from torchft.process_group import ProcessGroup, ProcessGroupGloo


def one_process(
    largest: Callable[[DataPosition], float] = lambda position: 1.0, device: Optional[torch.device] = None
) -> torch.Tensor:
    """Trains on the same units in one process with exact sums, without Manager, loader and groups."""
    plan, data, model = DataPlan(SAMPLES, **SETTINGS), dataset(), make_model().to(device)
    optimizer = make_optimizer(model)
    total = ExactSum(model.named_parameters(), plan.num_units(DataPosition()))
    position = DataPosition()
    while position != plan.end:
        complete = False
        while not complete:
            total.begin()
            units = plan.share(position, 0, 1).units
            for unit in units:
                x, y, _ = (part.to(device) for part in data[list(unit.indices)])
                (nn.functional.mse_loss(model(x), y) * largest(position) * unit.weight).backward()
                total.add()
            complete = total.read()
        optimizer.step()
        total.commit()
        position = plan.advance(position)
    return flat(model).cpu()


def job(**fields: Any) -> Training:
    settings = {"reproducible_reduction": True, **fields.pop("settings", {})}
    return Training(settings=settings, **fields)


def check_bits(
    training: Training, ended: list[Optional[torch.Tensor]], incomplete: frozenset[int] = frozenset()
) -> None:
    check(training, ended, incomplete)
    expected = one_process()
    for weights in ended:
        assert weights is None or torch.equal(weights, expected)


# The slow one combines settings that test_a_group_fails_and_another_one_joins also combines.
@pytest.mark.parametrize(
    ("groups", "use_async_quorum"),
    [(1, True), (1, False), (3, True), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_any_number_of_groups_ends_with_the_bits_of_one_process(groups: int, use_async_quorum: bool) -> None:
    training = job(start_with=groups, settings={"use_async_quorum": use_async_quorum})
    with Cluster(min_replicas=groups) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(groups)))
    check_bits(training, ended)
    assert training.lost == [], "another pass over the first step's units is no lost step"


@pytest.mark.parametrize("wrap", [wrapped_by_torchft, wrapped_one_by_one, wrapped_by_pytorch])
def test_wrapped_models(wrap: Callable[[Manager, nn.Module], nn.Module]) -> None:
    training = job(start_with=2, wrap=wrap)
    training.events[1, 0, 3] = lambda rank: "failed" if training.lost == [] else None
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check_bits(training, ended, incomplete=frozenset({3}))


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_group_fails_and_another_one_joins(use_async_quorum: bool) -> None:
    training = job(start_with=3, settings={"use_async_quorum": use_async_quorum})
    ended = ends_of_a_failure_and_a_join(training)
    check_bits(training, ended)
    assert sum(weights is not None for weights in ended) == 3


def small(position: DataPosition) -> float:
    """A factor with which each epoch has two steps that are repeated."""
    return 1.0 if position.batch == 2 else 2.0**-30


class Small(nn.Module):
    """A model with gradients of this factor."""

    def __init__(self, manager: Manager, model: nn.Module) -> None:
        super().__init__()
        self.manager, self.model = manager, model
        self.batches = DataPlan(SAMPLES, **SETTINGS).batches_per_epoch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(x)
        factor = small(DataPosition(*divmod(self.manager.current_step(), self.batches)))
        output.register_hook(lambda gradient: gradient * factor)
        return output


@pytest.mark.slow  # tests/integration/test_heal_along.py and test_loader.py have it without the setting
@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_joins_while_its_state_arrives_in_parts(
    use_async_quorum: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It applies the sums of the others, which show their scales, and repeats a step with them. Its own
    scales come with the last part.
    """
    monkeypatch.setitem(SETTINGS, "epochs", 40)
    settings = {"heal_along": True, "use_async_quorum": use_async_quorum}
    training = job(start_with=3, settings=settings, wrap=Small)
    with caplog.at_level(logging.INFO):
        ended = ends_of_a_failure_and_a_join(training, lambda group: ConnectsAtOnce(timeout=DEADLINE))
    expected = one_process(small)
    assert sum(weights is not None for weights in ended) == 3
    assert all(weights is None or torch.equal(weights, expected) for weights in ended)
    assert any("training along from step" in record.getMessage() for record in caplog.records)


def test_a_group_that_loses_the_last_step_heals_to_its_bits() -> None:
    training = job(start_with=3)
    training.events[1, 0, LAST] = lambda rank: "failed"
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    check_bits(training, ended, incomplete=frozenset({LAST}))


def test_a_spare_group_adds_nothing() -> None:
    fixed = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}
    training = job(start_with=3, settings=fixed)
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    check_bits(training, ended)


def test_a_group_at_another_position_heals() -> None:
    def restore(rank: Rank, loader: ElasticDataLoader) -> None:
        if rank.group == 1:
            loader.load_state_dict({**loader.state_dict(), "batch": 3})

    training = job(start_with=2, settings={"init_sync": False}, before=restore)
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check_bits(training, ended)
    assert len(training.lost) == 2
    assert all("do not train on the same batch" in why for why in training.lost)


def test_a_group_with_other_scales_heals() -> None:
    def restore(rank: Rank, loader: ElasticDataLoader) -> None:
        if rank.group == 1:
            exponents = {name: 16 for name, _ in make_model().named_parameters()}
            loader.load_state_dict({**loader.state_dict(), "scales": {"format": 1, "exponents": exponents}})

    training = job(start_with=2, settings={"init_sync": False}, before=restore)
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check_bits(training, ended)
    assert len(training.lost) == 2


# Further passes


def growing(position: DataPosition) -> float:
    """A factor that grows so much that gradients do not fit, and then shrinks so that few of their bits are
    left.
    """
    return 2.0**30 if position.batch == 2 else 1.0


@dataclass
class Ranks:
    """A loop in groups of several ranks, whose gradients grow and shrink."""

    group_size: int
    groups: int = 2
    # The rank of group 0, and the step, whose first attempt fails with an error.
    fails: tuple[int, int] = (-1, -1)
    device_of: Callable[[Rank], torch.device] = lambda rank: torch.device("cpu")
    make_pg: Callable[[int], ProcessGroup] = lambda group: ProcessGroupGloo(timeout=DEADLINE)
    repeated: list[list[int]] = field(default_factory=list)  # for each rank, the steps with a second pass
    lost: list[str] = field(default_factory=list)
    made: list[ProcessGroupGloo] = field(default_factory=list)

    def __call__(self, rank: Rank) -> torch.Tensor:
        device = self.device_of(rank)
        net = make_model().to(device)
        sgd = make_optimizer(net)
        manager = rank.start_manager(
            load_state_dict=lambda state: (
                net.load_state_dict(state["net"]),
                sgd.load_state_dict(state["sgd"]),
            ),
            state_dict=lambda: {"net": net.state_dict(), "sgd": sgd.state_dict()},
            reproducible_reduction=True,
        )
        group = ProcessGroupGloo(timeout=DEADLINE)
        group.configure(f"localhost:{rank.store.port}/ranks", "ranks", rank.rank, rank.world_size)
        self.made.append(group)
        loader = ElasticDataLoader(manager, dataset(), **SETTINGS, data_group=group)
        optimizer = Optimizer(manager, sgd)
        rank.cluster.wait_for_healthy(self.groups)
        repeated = []
        for step in loader:
            optimizer.zero_grad()
            number = manager.current_step()
            for unit in step:
                with unit.accumulate(net):
                    x, y, _ = (tensor.to(device) for tensor in unit.data)
                    loss = nn.functional.mse_loss(net(x), y)
                    (loss * growing(step.position) * unit.weight).backward()
                    if (rank.group, rank.rank, number) == (0, *self.fails) and self.lost == []:
                        manager.report_error(RuntimeError("planned"))
                if unit.repeated and unit.last:
                    repeated.append(number)
            optimizer.step()
            error = manager.errored()
            if manager.current_step() == number:
                self.lost.append(str(error.original_exception) if error else "")
        self.repeated.append(repeated)
        return flat(net).cpu()

    def run(self) -> list[torch.Tensor]:
        with Cluster(min_replicas=self.groups, make_pg=self.make_pg) as cluster:
            ended = results(
                *(cluster.start(self, group, world_size=self.group_size) for group in range(self.groups))
            )
        for group in self.made:
            group.shutdown()
        return ended


@pytest.mark.parametrize("group_size", [1, 2])
def test_gradients_that_do_not_fit_are_repeated_in_the_same_step(group_size: int) -> None:
    ranks = Ranks(group_size)
    ended, expected = ranks.run(), one_process(growing)
    assert all(torch.equal(weights, expected) for weights in ended)
    assert ranks.lost == []
    assert all(repeated == ranks.repeated[0] for repeated in ranks.repeated), "alike on all ranks"
    assert ranks.repeated[0][:2] == [0, 2]


@pytest.mark.parametrize("step", [0, 3])
def test_a_rank_without_the_sum_prevents_another_pass_of_its_group(step: int) -> None:
    """In step 0 its peers would do another pass, and wait for it there."""
    ranks = Ranks(2, fails=(1, step))
    ended, expected = ranks.run(), one_process(growing)
    assert all(torch.equal(weights, expected) for weights in ended)
    assert "another rank of this group did not get the sum of the step" in ranks.lost


def test_gradients_that_differ_from_pass_to_pass_cost_the_step() -> None:
    passes = []

    def do(manager: Manager) -> None:
        net = make_model()
        for unit in next(ElasticDataLoader(manager, dataset(), **SETTINGS)):
            with unit.accumulate(net):
                (net(unit.data[0]).sum() * 2.0 ** (40 * len(passes))).backward()
            if unit.last:
                passes.append(unit.repeated)
        assert not manager.should_commit()
        error = manager.errored()
        assert error is not None and "gradients of the same units did not fit in 4" in str(
            error.original_exception
        )

    with Cluster() as cluster:
        tried(cluster, do)
    assert passes == [False, True, True, True]


def test_a_sum_of_another_number_of_units_is_refused() -> None:
    def do(manager: Manager) -> None:
        net, loader = make_model(), ElasticDataLoader(manager, dataset(), **SETTINGS)
        for unit in next(loader):
            with unit.accumulate(net):
                backward(manager, unit, net)
        loader.load_state_dict({**loader.state_dict(), "batch": 3})  # simulates a heal to this position
        with pytest.raises(SamplesDiffer, match="6 units were reduced, 3 belong to the batch"):
            loader.verify()

    with Cluster() as cluster:
        tried(cluster, do)


# What is refused


def test_a_group_without_the_setting_is_refused_by_name() -> None:
    training = job()
    ended, refusal = refused(training, Training())
    loader = "ElasticDataLoader: reproducible_reduction"
    assert f"{loader}=False here, {loader}=True in group_0" in refusal
    check_bits(training, ended)
    assert training.lost and all("reproducible_reduction=False" in why for why in training.lost)


@pytest.fixture
def alone() -> Any:
    with Cluster() as cluster:
        yield cluster


def tried(cluster: Cluster, do: Callable[[Manager], object], **settings: Any) -> None:
    """Calls a function with a Manager that has the setting and is alone in its job."""

    def loop(rank: Rank) -> None:
        do(rank.start_manager(**{"reproducible_reduction": True, "state_dict": dict, **settings, **LOAD}))

    results(cluster.start(loop, group=0))


LOAD: dict[str, Any] = {"load_state_dict": lambda state: None}


def test_without_a_loader_the_first_step_is_an_error(alone: Cluster) -> None:
    with pytest.raises(
        ValueError, match="reproducible_reduction=True needs an ElasticDataLoader: make one before"
    ):
        tried(alone, lambda manager: manager.start_quorum())


def test_local_steps_are_refused(alone: Cluster) -> None:
    with pytest.raises(
        ValueError, match=r"LocalSGD: reproducible_reduction=True is for .* choose reprod.*=False"
    ):
        tried(alone, lambda manager: manager.register_layout("LocalSGD", ["a"]))


def train_one(body: Callable[[Manager, Any, nn.Module], object]) -> Callable[[Manager], None]:
    def do(manager: Manager) -> None:
        net = make_model()
        for step in ElasticDataLoader(manager, dataset(), **SETTINGS):
            for unit in step:
                body(manager, unit, net)
            manager.should_commit()
            raise AssertionError(str(manager.errored()))

    return do


def backward(manager: Manager, unit: Any, net: nn.Module) -> None:
    (nn.functional.mse_loss(net(unit.data[0]), unit.data[1]) * unit.weight).backward()


def under(*models: Any) -> Callable[[Manager, Any, nn.Module], None]:
    def body(manager: Manager, unit: Any, net: nn.Module) -> None:
        with unit.accumulate(*models):
            backward(manager, unit, net)

    return body


def others(manager: Manager, unit: Any, net: nn.Module) -> None:
    with unit.accumulate(net if unit.indices == FIRST else make_model()):
        backward(manager, unit, net)


def also_as_floats(manager: Manager, unit: Any, net: nn.Module) -> None:
    with unit.accumulate(net):
        backward(manager, unit, net)
        manager.allreduce(torch.ones(1))


class OldSharded(nn.Linear):
    """FSDP2 of PyTorch 2.8 and older."""

    def set_requires_gradient_sync(self, value: bool) -> None: ...


FIRST = DataPlan(SAMPLES, **SETTINGS).share(DataPosition(), 0, 1).units[0].indices


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        (
            backward,
            UnitsSkipped,
            r"unit 0 of batch 0 of epoch 0 \(.*\) did not go through accumulate.*`with unit.accum",
        ),
        (under(), ValueError, "accumulate.. got no model: pass the models"),
        (others, ValueError, "accumulate.. got other models; each unit"),
        (
            under(OldSharded(1, 1)),
            ValueError,
            "has no set_custom_reduce_scatter, without which gradients cannot be added as integers",
        ),
        (also_as_floats, ValueError, "a sum of torch.float32 has other bits with other groups"),
    ],
)
def test_irreproducible_settings_are_refused(
    alone: Cluster, body: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        tried(alone, train_one(body))


def test_a_step_with_missing_units_is_lost(alone: Cluster) -> None:
    def do(manager: Manager) -> None:
        net = make_model()
        step = next(ElasticDataLoader(manager, dataset(), **SETTINGS))
        with next(iter(step)).accumulate(net):
            pass
        assert not manager.should_commit()
        error = manager.errored()
        assert error is not None and "and 4 more of this rank, did not go through accumulate()" in str(
            error.original_exception
        )

    tried(alone, do)


@pytest.mark.parametrize(
    ("loader", "match"),
    [
        (
            {"data_rank": 0, "data_world_size": 1},
            "data_world_size is 1, and the group has 2 ranks: with reprod",
        ),
        (
            {},
            "needs a process group of the 2 ranks of the group, and there is none: call init_process_group "
            "before",
        ),
    ],
)
def test_ranks_of_a_group_need_a_process_group_to_add_in(
    alone: Cluster, loader: dict[str, Any], match: str
) -> None:
    def loop(rank: Rank) -> None:
        manager = rank.start_manager(reproducible_reduction=True)
        with pytest.raises(ValueError, match=match):
            ElasticDataLoader(manager, dataset(), **SETTINGS, **loader)

    results(alone.start(loop, group=0, world_size=2))
