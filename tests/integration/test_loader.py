"""Groups that fail, join and lose steps end with the weights of one process."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.integration.cluster import DEADLINE, Cluster, Gate, Rank, results
from torchft import Optimizer
from torchft._manager.heal import mode
from torchft._manager.settings import HealMode
from torchft.data import ElasticDataLoader
from torchft.data._prefetch import ReadFailed
from torchft.data._step import UnitsSkipped
from torchft.data.loader import _OF_NO_STEP
from torchft.data.position import DataPlan, DataPosition
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.manager import Manager, WorldSizeMode
from torchft.process_group import ManagedProcessGroup, ProcessGroup, ProcessGroupGloo

SAMPLES = 41  # a multiple of neither batch nor unit
SETTINGS: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, seed=3, epochs=2)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh(), torch.arange(SAMPLES))


# Groups are threads, and would share one random generator.
_MODEL = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def make_model() -> nn.Module:
    return copy.deepcopy(_MODEL)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # With 0.3 some initial weights diverge so far that rounding alone exceeds what check() allows.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_process() -> torch.Tensor:
    """Trains on whole batches, with the mean over the samples of each; torchft only provides the order."""
    plan, data, model = DataPlan(SAMPLES, **SETTINGS), dataset(), make_model()
    optimizer = make_optimizer(model)
    position = DataPosition()
    while position != plan.end:
        indices = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data.tensors[0][indices]), data.tensors[1][indices]).backward()
        optimizer.step()
        position = plan.advance(position)
    return flat(model)


@dataclass
class Training:
    """A user's training loop, and the samples that it trained on."""

    # Called when a group has its units of a step, by (group, incarnation, step)
    events: dict[tuple[int, int, int], Callable[[Rank], Optional[str]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the Manager
    loader: dict[str, Any] = field(default_factory=dict)
    start_with: int = 1  # number of groups that must be healthy before the first step
    wrap: Callable[[Any, nn.Module], nn.Module] = lambda manager, model: model
    # Called before the first step.
    before: Callable[[Rank, ElasticDataLoader], None] = lambda rank, loader: None
    device_of: Callable[[Rank], torch.device] = lambda rank: torch.device("cpu")
    data: Any = field(default_factory=dataset)
    # "continue" or "break" instead of training on a unit, by (group, step, number of the unit in this rank's
    # share)
    leaves_out: dict[tuple[int, int, int], str] = field(default_factory=dict)
    lives: Counter[int] = field(default_factory=Counter)
    # The weight of each sample in the step that a group committed, by (group, step)
    committed: dict[tuple[int, int], Counter[int]] = field(default_factory=dict)
    kept: dict[int, Counter[int]] = field(default_factory=dict)  # by group
    # the number of units that count in each attempt, by (group, step)
    units: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    # Groups whose weights were of no step after one that they lost.
    unusable: list[int] = field(default_factory=list)
    lost_one: Gate = field(default_factory=Gate)

    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        life, self.lives[rank.group] = self.lives[rank.group], self.lives[rank.group] + 1
        device = self.device_of(rank)
        net = make_model().to(device)
        sgd = make_optimizer(net)

        def save() -> dict[str, Any]:
            return {"net": net.state_dict(), "sgd": sgd.state_dict()}

        def load(state: dict[str, Any]) -> None:
            net.load_state_dict(state["net"])
            sgd.load_state_dict(state["sgd"])

        manager = rank.start_manager(load_state_dict=load, state_dict=save, **self.settings)
        model = self.wrap(manager, net)
        optimizer = Optimizer(manager, sgd)
        loader = ElasticDataLoader(manager, self.data, **{**SETTINGS, **self.loader})
        self.before(rank, loader)
        rank.cluster.wait_for_healthy(self.start_with if life == 0 else 1)
        for step in loader:
            number = manager.current_step()
            event = self.events.get((rank.group, life, number))
            what = event(rank) if event is not None else None
            if what == "crashed":
                return None
            optimizer.zero_grad()
            # the samples in this group's gradients, those among them that it kept of earlier attempts
            seen = Counter(self.kept[rank.group]) if step.again else Counter()
            self.units.setdefault((rank.group, number), []).append(
                sum(unit.weight > 0 for unit in step._share.units)
            )
            for place, unit in enumerate(step):
                instead = self.leaves_out.get((rank.group, number, place))
                if instead == "break":
                    break
                if instead == "continue":
                    continue
                with unit.accumulate(model):
                    x, y, indices = (part.to(device, non_blocking=True) for part in unit.data)
                    assert tuple(indices.tolist()) == tuple(unit.indices)
                    (nn.functional.mse_loss(model(x), y) * unit.weight).backward()
                if unit.weight and not unit.repeated:
                    seen.update(unit.indices)
            if model is net and not self.settings.get("reproducible_reduction"):
                for p in net.parameters():
                    assert p.grad is not None
                    manager.allreduce(p.grad).wait()
            if what == "left out":
                continue
            if what == "failed":
                manager.report_error(RuntimeError("planned"))
            before = manager.current_step()
            participating = manager.is_participating()
            self.kept[rank.group] = seen
            optimizer.step()
            assert step.committed is (manager.current_step() > before)
            usable = _OF_NO_STEP not in loader.state_dict()  # a job may resume from a checkpoint of now
            if step.committed:
                assert usable and (participating or not seen)
                self.committed[rank.group, before] = seen
            else:
                error = manager.errored()
                self.lost.append(str(error.original_exception) if error else "")
                self.unusable += [] if usable else [rank.group]
                self.lost_one.open()
        assert loader.position == DataPosition(SETTINGS["epochs"], 0)
        return flat(net).cpu()


def check(
    training: Training, weights: list[Optional[torch.Tensor]], incomplete: frozenset[int] = frozenset()
) -> None:
    """Checks that all groups ended with the weights of one process, and that each committed step contains
    each of its samples once.

    Args:
        incomplete: steps that some groups committed and another one lost, so that its samples were not
            recorded.
    """
    expected = one_process()
    for ended in weights:
        if ended is not None:
            torch.testing.assert_close(ended, expected, rtol=0, atol=1e-9)
    plan = DataPlan(SAMPLES, **SETTINGS)
    seen: dict[int, Counter[int]] = {}
    for (_, number), indices in training.committed.items():
        seen.setdefault(number, Counter()).update(indices)
    position = DataPosition()
    for number in range(plan.batches_per_epoch * plan.epochs):
        if number not in incomplete:
            batch = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
            assert seen[number] == Counter(batch), f"step {number}"
        position = plan.advance(position)
    assert position == plan.end


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups", [1, 3])
def test_any_number_of_groups_ends_with_the_weights_of_one_process(
    groups: int, use_async_quorum: bool
) -> None:
    training = Training(start_with=groups, settings={"use_async_quorum": use_async_quorum})
    with Cluster(min_replicas=groups) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(groups)))
    check(training, ended)
    assert training.lost == []


def ends_of_a_failure_and_a_join(
    training: Training,
    make_pg: Callable[[int], ProcessGroup] = lambda group: ProcessGroupGloo(timeout=DEADLINE),
) -> list[Optional[torch.Tensor]]:
    """Returns the weights of three groups, one of which fails in its third step, and of the group that
    replaces it.
    """
    restart, replaced = Gate(), Gate()

    def fail(rank: Rank) -> str:
        rank.crash()
        restart.open()
        return "crashed"

    def begin(rank: Rank, _: ElasticDataLoader) -> None:
        if rank.group == 2 and training.lives[2] == 2:
            replaced.open()

    def wait_for_three(rank: Rank) -> None:
        rank.cluster.wait(replaced)  # the one that failed may still count as healthy
        rank.cluster.wait_for_healthy(3)

    training.before = begin
    training.events[2, 0, 2] = fail
    training.events[0, 0, 4] = training.events[1, 0, 4] = wait_for_three
    with Cluster(min_replicas=2, make_pg=make_pg) as cluster:
        first = [cluster.start(training, group=group) for group in range(3)]
        cluster.wait(restart)
        return results(*first, cluster.start(training, group=2))


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_group_fails_and_another_one_joins(use_async_quorum: bool) -> None:
    training = Training(start_with=3, settings={"use_async_quorum": use_async_quorum})
    ended = ends_of_a_failure_and_a_join(training)
    check(training, ended)
    assert sum(weights is not None for weights in ended) == 3
    assert len(training.lost) >= 2


def wrapped_by_torchft(manager: Manager, net: nn.Module) -> nn.Module:
    return DistributedDataParallel(manager, net)


def wrapped_one_by_one(manager: Manager, net: nn.Module) -> nn.Module:
    return PureDistributedDataParallel(manager, net)


def wrapped_by_pytorch(manager: Manager, net: nn.Module) -> nn.Module:
    group = ManagedProcessGroup(manager)
    return nn.parallel.DistributedDataParallel(net, process_group=group, find_unused_parameters=True)


class ConnectsAtOnce(ProcessGroupGloo):
    connects_standby = False  # else the others could be at their end before the newcomer is connected


@pytest.mark.parametrize(
    ("settings", "workers", "little", "wrap"),
    [
        ({"heal_along": True}, 0, None, Training.wrap),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({"heal_along": True}, 1, None, wrapped_by_torchft),
                ({"heal_along": True, "use_async_quorum": False}, 0, None, Training.wrap),
                ({}, 0, 0, Training.wrap),
                ({"use_async_quorum": False}, 0, 0, Training.wrap),
                ({}, 0, None, Training.wrap),
            )
        ),
    ],
)
def test_a_group_joins_while_its_state_arrives_in_parts(
    settings: dict[str, Any],
    workers: int,
    little: Optional[int],
    wrap: Callable[[Manager, nn.Module], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It trains along on a unit of weight 0. Its position comes with the last part of the state. That is the
    default with a loader, unless the state is small.
    """
    if little is not None:
        monkeypatch.setattr(mode, "LITTLE", little)
        monkeypatch.setattr(mode.Figures, "mode", HealMode.IN_PASSING)
    monkeypatch.setitem(SETTINGS, "epochs", 40)
    training = Training(start_with=3, settings=settings, loader={"num_workers": workers}, wrap=wrap)
    with caplog.at_level(logging.INFO):
        ended = ends_of_a_failure_and_a_join(training, lambda group: ConnectsAtOnce(timeout=DEADLINE))
    check(training, ended)
    assert sum(weights is not None for weights in ended) == 3
    logged = [record.getMessage() for record in caplog.records]
    in_passing = "heal_along" in settings or little is not None
    assert any("training along from step" in text for text in logged) == in_passing
    assert all("it has about 0.0 MB" in text for text in logged if "transferred at once" in text)
    assert any("transferred at once" in text for text in logged) != in_passing
    assert set(training.unusable) == ({2} if in_passing else set())


def test_a_step_in_which_a_group_fails_is_repeated() -> None:
    training = Training(start_with=3)
    training.events[1, 0, 3] = lambda rank: "failed" if training.lost == [] else None
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    check(training, ended, incomplete=frozenset({3}))
    assert "planned" in training.lost  # another rank may be first to see that the connection ends


LAST = 7  # the number of the last step


@pytest.mark.parametrize(
    "settings",
    [
        {"use_async_quorum": True},
        pytest.param({"use_async_quorum": False}, marks=pytest.mark.slow),
        {"heal_along": True},
        pytest.param({"heal_along": True, "use_async_quorum": False}, marks=pytest.mark.slow),
    ],
)
def test_a_group_that_loses_the_last_step_heals_before_the_others_end(settings: dict[str, Any]) -> None:
    training = Training(start_with=3, settings=settings)
    training.events[1, 0, LAST] = lambda rank: "failed"
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    check(training, ended, incomplete=frozenset({LAST}))
    # Its own failure, and the step that shows it that there is no more data
    assert len(training.lost) <= 2


def plain(manager: Manager, net: nn.Module) -> nn.Module:
    return net


@pytest.mark.parametrize("wrap", [wrapped_by_torchft, wrapped_one_by_one, wrapped_by_pytorch])
def test_wrapped_models_reduce_once_a_step(wrap: Callable[[Manager, nn.Module], nn.Module]) -> None:
    training = Training(start_with=2, wrap=wrap)
    training.events[1, 0, 3] = lambda rank: "failed" if training.lost == [] else None
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check(training, ended, incomplete=frozenset({3}))


@pytest.mark.parametrize(
    ("wrap", "number", "place", "instead"),
    [
        (plain, 0, 0, "continue"),  # the first step of a quorum: the other groups count samples
        (plain, 2, 1, "break"),
        (wrapped_by_torchft, 2, 2, "continue"),  # nothing is reduced, and the other groups wait for it
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (plain, 2, 0, "continue"),
                (plain, 2, 2, "continue"),
                (wrapped_by_torchft, 2, 0, "continue"),
                (wrapped_one_by_one, 2, 1, "break"),
            )
        ),
    ],
)
def test_a_loop_that_skips_a_unit_gets_an_error_and_the_others_train_on_all_samples(
    wrap: Callable[[Manager, nn.Module], nn.Module], number: int, place: int, instead: str
) -> None:
    """Each group has three units in these steps."""
    job = Training(start_with=2, wrap=wrap, leaves_out={(1, number, place): instead})

    def left_out(rank: Rank) -> None:
        with pytest.raises(
            UnitsSkipped, match=rf"unit \d of batch {number} of epoch 0 \(samples \d+, \d+\).* did not"
        ):
            job(rank)
        rank.crash()

    with Cluster(min_replicas=1) as cluster:
        first = cluster.start(job, group=0)
        results(cluster.start(left_out, group=1))
        ended = results(first)
    check(job, ended)


def test_a_spare_group_trains_along_with_weight_0() -> None:
    fixed = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}
    training = Training(start_with=3, settings=fixed)
    with Cluster(min_replicas=3) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(3)))
    check(training, ended)
    assert all(not indices for (group, _), indices in training.committed.items() if group == 2)


def test_a_group_at_another_position_heals() -> None:
    """As after a restart from checkpoints of different positions: the first group's position counts."""

    def restore(rank: Rank, loader: ElasticDataLoader) -> None:
        if rank.group == 1:
            loader.load_state_dict({**loader.state_dict(), "batch": 2})

    training = Training(start_with=2, settings={"init_sync": False}, before=restore)
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(training, group=group) for group in range(2)))
    check(training, ended)
    assert len(training.lost) == 2
    assert all("do not train on the same batch" in why for why in training.lost)


def refused(
    job: Training, newcomer: Callable[[Rank], object], **cluster_settings: Any
) -> tuple[list[Optional[torch.Tensor]], str]:
    """Lets a group that does not fit join a job. Returns the final weights of the job, and the error of that
    group.
    """
    started = Gate()

    def join(rank: Rank) -> str:
        started.wait()
        try:
            newcomer(rank)
        except ValueError as e:
            # If this group fails before the others have read its announcement, they lose a step to its
            # failure.
            job.lost_one.wait()
            return str(e)
        finally:
            rank.crash()
        raise AssertionError("it was not refused")

    def await_it(rank: Rank) -> None:
        started.open()
        rank.cluster.wait_for_healthy(2)

    def repeat_alone(rank: Rank) -> Optional[str]:
        # On a busy machine the notice that another group is there may arrive after all steps of this job.
        assert rank.manager is not None
        rank.manager.wait_quorum()
        alone = rank.manager.errored() is None and rank.pg.size() == 1  # an aborted group has no size
        return "left out" if alone and not job.lost else None

    job.events[0, 0, 2] = await_it
    job.events[0, 0, 3] = repeat_alone
    with Cluster(**cluster_settings) as cluster:
        ended, (refusal,) = cluster.start(job, group=0), results(cluster.start(join, group=1))
        return results(ended), refusal


@pytest.mark.parametrize(
    ("setting", "ours", "other"),
    [
        ("seed", 3, {"seed": 4}),
        ("reduction_in_group", "mean", {"reduction_in_group": "sum"}),
        ("reproducible_rng", False, {"reproducible_rng": True}),
        ("data_world_size", 1, {"data_rank": 1, "data_world_size": 2}),
    ],
)
def test_a_group_with_another_dataset_is_refused_by_name(
    setting: str, ours: object, other: dict[str, Any]
) -> None:
    job = Training()
    ended, refusal = refused(job, Training(loader=other))
    theirs = f"{setting}={other[setting]}"
    assert f"ElasticDataLoader: {theirs} here, ElasticDataLoader: {setting}={ours} in group_0:" in refusal
    check(job, ended)
    assert job.lost and all(theirs in why for why in job.lost)


def test_a_group_with_another_pytorch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def newcomer(rank: Rank) -> None:
        monkeypatch.setattr("torchft.data.loader._TORCH", "1.0")
        Training()(rank)

    job = Training()
    ended, refusal = refused(job, newcomer)
    assert "ElasticDataLoader: torch=1.0 here, ElasticDataLoader: torch=2." in refusal
    check(job, ended)


def test_a_group_with_another_model_is_refused_by_name_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, refusal = Gate(), list[str]()

    def newcomer(rank: Rank) -> None:
        started.wait()
        with monkeypatch.context() as patched:
            other = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1)).double()
            patched.setattr(f"{__name__}.make_model", lambda: other)
            with pytest.raises(ValueError, match="reduces other tensors than") as error:
                Training(wrap=DistributedDataParallel)(rank)
        refusal.append(str(error.value))
        ended.open()

    def await_it(rank: Rank) -> None:
        started.open()
        ended.wait()

    job, ended = Training(wrap=DistributedDataParallel, events={(0, 0, 2): await_it}), Gate()
    with Cluster() as cluster:
        running, other = cluster.start(job, group=0), cluster.start(newcomer, group=1)
        results(other)
        check(job, results(running))
    assert job.lost == []
    assert "0.weight float64[2, 4]" in refusal[0], refusal


def without_loader(rank: Rank) -> None:
    manager = rank.start_manager(load_state_dict=lambda state: None, state_dict=dict)
    for _ in range(2):
        manager.start_quorum()
        manager.allreduce(torch.ones(4)).wait()
        manager.should_commit()


def test_a_group_without_a_loader_is_refused_by_name() -> None:
    job = Training()
    ended, refusal = refused(job, without_loader)
    assert "the data loader differs: 'none' here, 'ElasticDataLoader' in group_0:" in refusal
    assert "a group without one would divide their sum by the number of groups" in refusal
    check(job, ended)
    assert job.lost and all("in group_1:" in why for why in job.lost)


def test_a_dataset_error_ends_its_group_and_the_others_lose_a_step() -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index % 2:
                raise OSError("the disk has failed")
            return super().__getitem__(index)

    job = Training(start_with=2)

    def fail(rank: Rank) -> str:
        with pytest.raises(ReadFailed, match=r"of batch 0 of epoch 0 could not be read: OSError: the disk"):
            # Waits for the other group, so that the failing group is in its quorum and costs it the step.
            Training(start_with=2, data=Broken(*dataset().tensors))(rank)
        rank.crash()
        return "failed"

    with Cluster(min_replicas=1) as cluster:
        running = cluster.start(job, group=1)
        assert results(cluster.start(fail, group=0)) == ["failed"]
        ended = results(running)
    check(job, ended)
    assert len(job.lost) == 1
