"""The effects of a loader on a Manager, and the settings that it excludes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Optional, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.utils.data import IterableDataset

from tests.unit.manager.conftest import Fixture, quorum
from torchft import Optimizer
from torchft._agreement import announce
from torchft._manager.checks.layout import announcement
from torchft._manager.checks.loader import BatchDiffers, Data
from torchft._manager.edge import device_of
from torchft._manager.quorum.plan import Plan as QuorumPlan
from torchft._manager.quorum.plan import WorldSizeMode, make_plan
from torchft._manager.settings import HealMode
from torchft.data import ElasticDataLoader
from torchft.data._prefetch import ReadFailed
from torchft.data.position import DataPlan, DataPosition, RankShare, SamplesDiffer
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager
from torchft.process_group import ManagedProcessGroup, ProcessGroupDummy
from torchft.work import _DummyWork


@pytest.fixture
def native(fixture: Fixture) -> Fixture:
    """Makes the peers' handles native ones, which announce nothing."""
    fixture.client._quorum.return_value = quorum(reconfigure_handles=["native 0", "native 1"])
    fixture.pg = Native(0, 1)
    return fixture


class Native(ProcessGroupDummy):
    def reconfigure(self, opts: Any) -> Any:
        return _DummyWork(None)


def attach(manager: Manager, peers: Optional[Fixture] = None) -> ElasticDataLoader:
    """Makes a loader; the peers have one too."""
    loader = ElasticDataLoader(manager, list(range(10)), global_batch_size=4, micro_batch_size=2)
    if peers is not None:
        announce_the_same(manager, peers)
    return loader


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, HealMode.AUTO),
        ({"heal": "auto"}, HealMode.AUTO),
        ({"heal_along": True}, HealMode.IN_PASSING),
        ({"heal": "at_once"}, HealMode.AT_ONCE),
    ],
)
def test_how_groups_with_a_loader_heal(fixture: Fixture, given: dict[str, Any], mode: HealMode) -> None:
    manager = fixture.manager(**given)
    assert manager._in_passing.mode is HealMode.AT_ONCE or given
    attach(manager)
    assert manager._in_passing.mode is mode


def test_by_default_groups_that_average_weights_heal_at_once(fixture: Fixture) -> None:
    manager = fixture.manager(use_async_quorum=False)
    net = nn.Linear(1, 1)
    with LocalSGD(manager, net, torch.optim.SGD(net.parameters()), sync_every=2):
        attach(manager)
        assert manager._in_passing.mode is HealMode.AT_ONCE


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_is_not_cut_by_the_speeds_of_the_groups(native: Fixture, stream: bool) -> None:
    """In a new cut sources change owners, each of which may have to read all that came before."""
    manager = native.manager()
    data: Any = Stream() if stream else list(range(10))
    sizes: dict[str, Any] = dict(global_batch_size=4, micro_batch_size=2)
    group: Any = SimpleNamespace(size=lambda: 2)
    loader = ElasticDataLoader(manager, data, shuffle=False, data_group=group, **sizes)
    announce_the_same(manager, native)
    with patch.object(manager._rounds, "begin", wraps=manager._rounds.begin) as begin:
        next(loader)
    assert begin.call_args.args[1].cuts_by_speed is not stream


def native_handle(handle: str, manager: Manager) -> str:
    """A native handle that announces the layout of a manager."""
    manager._layout.for_lighthouse()  # what is registered after this is not announced
    lines = manager._layout.compared()
    assert lines is not None
    return announce(handle, tuple(announcement(lines)), native=True)


def announce_the_same(manager: Manager, peers: Fixture) -> None:
    handles = [native_handle(f"native {number}", manager) for number in range(2)]
    peers.client._quorum.return_value.reconfigure_handles = handles


@pytest.mark.parametrize("with_loader", [True, False])
def test_an_average_is_the_sum_of_weighted_gradients(native: Fixture, with_loader: bool) -> None:
    manager = native.manager()
    if with_loader:
        next(attach(manager, native))
    else:
        manager.start_quorum()
    gradient = torch.full((2,), 6.0)
    manager.allreduce(gradient, reduce_op=ReduceOp.AVG).wait()
    assert gradient.tolist() == ([6.0, 6.0] if with_loader else [3.0, 3.0])
    assert ManagedProcessGroup(manager).size() == (1 if with_loader else 2)
    assert manager.num_participants() == 2


def test_an_incomplete_batch_is_not_committed(native: Fixture) -> None:
    """The dummy group reduces nothing, so the samples of the other group are missing. This group need not
    heal.
    """
    manager = native.manager()
    loader = attach(manager, native)
    before = loader.position
    next(loader)
    manager.allreduce(torch.ones(2)).wait()
    assert not manager.should_commit()
    assert native.votes() == [False]
    assert "the sum lacks some of the 2 groups that take part" in str(manager.errored())
    assert loader.position == before
    assert manager.current_step() == 0


def test_a_step_is_begun_once(native: Fixture) -> None:
    manager = native.manager()
    loader = attach(manager, native)
    next(loader)
    manager.start_quorum()  # like the optimizer's zero_grad
    next(loader)
    assert native.client._quorum.call_count == 1


def alone(handles: list[str], **fields: Any) -> Any:
    """A quorum without peers."""
    one: dict[str, Any] = dict(replica_rank=0, replica_world_size=1, max_replica_rank=0, max_world_size=1)
    return quorum(**one, replica_ids=["group_1:uuid"], reconfigure_handles=handles, **fields)


def train(manager: Manager, step: Any, model: nn.Module) -> None:
    for unit in step:
        with unit.accumulate(model):
            model(torch.ones(1)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        manager.allreduce(parameter.grad).wait()


@pytest.mark.parametrize("zero_grad_last", [False, True])
def test_a_drain_ends_the_loop_between_two_steps(native: Fixture, zero_grad_last: bool) -> None:
    """The loop may call zero_grad after the optimizer's step. If there is no loader, that call begins the
    next step.
    """
    manager, model = native.manager(), nn.Linear(1, 1)
    loader = attach(manager)
    assert manager._layout.lines is not None
    handles = [native_handle("native", manager)]
    native.client._quorum.side_effect = [alone(handles), alone(handles, draining=True), alone(handles)]
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in loader:
        if not zero_grad_last:
            optimizer.zero_grad()
        train(manager, step, model)
        optimizer.step()
        if zero_grad_last:
            optimizer.zero_grad()
    assert native.votes() == [True, True]
    assert manager.draining()


def test_only_the_first_step_of_a_quorum_reduces_24_more_bytes(native: Fixture) -> None:
    reduced: list[int] = []

    class Counts(Native):
        def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any:
            reduced.extend(tensor.nbytes for tensor in tensors)
            return super().allreduce(tensors, opts)

    native.pg = Counts(0, 1)
    manager, model = native.manager(), nn.Linear(1, 1)
    loader = attach(manager)
    assert manager._layout.lines is not None
    handles = [native_handle("native", manager)]
    first, second = alone(handles), alone(handles, quorum_id=2)
    native.client._quorum.side_effect = [first, first, second, second]
    optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = []
    for step in loader:
        optimizer.zero_grad()
        train(manager, step, model)
        optimizer.step()
        steps.append(reduced.copy())
        reduced.clear()
    assert steps == [[24, 4, 4], [4, 4], [24, 4, 4]]
    assert reduced == [], "the end is in the quorum of the last step"


def test_a_reduction_before_the_units_begins_no_other_step(native: Fixture) -> None:
    """For example, a number of tokens is reduced. If that began another step, the units would belong to
    another quorum.
    """
    manager = native.manager()
    loader = attach(manager, native)
    step = next(loader)
    manager.allreduce(torch.ones(1)).wait()
    manager.start_quorum()  # like the optimizer's zero_grad
    assert len(list(step)) == 1
    assert native.client._quorum.call_count == 1


@pytest.mark.parametrize(
    ("backend", "device"),
    [
        ("torchft-gloo", "cpu"),
        ("torchft-dummy", "cpu"),
        ("torchft-nccl", "cuda"),
        ("torchft-baby-xccl", "xpu"),
    ],
)
def test_positions_are_compared_where_the_process_group_reduces(backend: str, device: str) -> None:
    class Named(ProcessGroupDummy):
        def getBackendName(self) -> str:
            return backend

    assert device_of(Named(0, 1)) == torch.device(device)

    class OfAnotherName(Named):
        _device = "meta"

    assert device_of(OfAnotherName(0, 1)) == torch.device("meta"), "its class tells it"


def test_the_first_unit_waits_for_the_quorum_and_no_heal(native: Fixture) -> None:
    native.client._quorum.return_value = quorum(
        reconfigure_handles=["native 0", "native 1"],
        max_step=7,
        max_replica_rank=None,
        max_world_size=1,
        heal=True,
        recover_src_replica_rank=0,
    )
    began, ended = threading.Event(), threading.Event()

    def receive(**_: Any) -> Any:
        began.set()
        assert ended.wait(10)
        raise RuntimeError("the source has failed")

    native.transport.recv_checkpoint.side_effect = receive
    step = next(attach(native.manager(), native))
    assert [unit.weight for unit in step] == [0.0]
    assert began.wait(10), "no heal began"
    assert not ended.is_set()
    ended.set()


def test_at_step_0_all_take_part_with_a_loader() -> None:
    def plan(heal_first: bool, step: int) -> Any:
        result = quorum(max_step=step, max_replica_rank=None, max_world_size=1)
        result.replica_rank, result.replica_world_size = 1, 2
        made = make_plan(
            result,
            use_async_quorum=True,
            allow_heal=True,
            world_size_mode=WorldSizeMode.DYNAMIC,
            min_replica_size=1,
            heal_first=heal_first,
        )
        return made.participating_rank, made.participants, made.in_background

    assert plan(True, 0) == (1, 2, False)
    assert plan(False, 0) == plan(True, 3) == (None, 1, True)


def test_native_peers_without_a_loader_are_refused_by_name(native: Fixture) -> None:
    manager = native.manager()
    loader = attach(manager)  # the others announce nothing
    with pytest.raises(ValueError, match="loader differs: 'ElasticDataLoader' here, 'none' in group_0:uuid"):
        next(loader)


def test_a_native_peer_with_a_loader_is_refused_by_name_where_there_is_none(native: Fixture) -> None:
    attach(native.manager(), native)
    manager = native.manager()
    manager.start_quorum()
    with pytest.raises(ValueError, match="loader differs: 'none' here, 'ElasticDataLoader' in group_0:uuid"):
        manager.wait_quorum()


# Errors of this rank


class Unreadable(list[int]):
    def __getitem__(self, index: Any) -> Any:
        raise OSError("the disk has failed")


def reads(manager: Manager, peers: Fixture) -> None:
    loader = ElasticDataLoader(manager, Unreadable(range(10)), global_batch_size=4, micro_batch_size=2)
    announce_the_same(manager, peers)
    with pytest.raises(ReadFailed, match="the disk has failed"):
        list(next(loader))


def leaves_units_out(manager: Manager, peers: Fixture) -> None:
    loader = ElasticDataLoader(
        manager, list(range(10)), global_batch_size=4, micro_batch_size=1, data_rank=0, data_world_size=1
    )
    announce_the_same(manager, peers)
    _, last = next(loader)
    with last.accumulate():
        manager.allreduce(torch.ones(2)).wait()


def has_a_group_that_failed(manager: Manager, peers: Fixture) -> None:
    """A process group whose other rank has ended, so that an addition over the ranks raises an error."""
    group = GroupOfRanks(1, 2)
    loader = ElasticDataLoader(
        manager, list(range(10)), global_batch_size=4, micro_batch_size=2, data_group=group
    )
    announce_the_same(manager, peers)
    model = nn.Linear(1, 1)
    unit = next(iter(next(loader)))
    with pytest.raises(RuntimeError, match="connection closed by the other rank"), unit.accumulate(model):
        model(torch.ones(1)).backward()


class GroupOfRanks(ProcessGroupDummy):
    def size(self) -> int:
        return 2

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        raise RuntimeError("connection closed by the other rank")


@pytest.mark.parametrize(
    ("fail", "settings"),
    [(reads, {}), (leaves_units_out, {}), (has_a_group_that_failed, {"reproducible_reduction": True})],
)
def test_an_error_of_this_rank_ends_the_collectives_of_its_peers_and_suspects_none(
    native: Fixture, fail: Callable[[Manager, Fixture], None], settings: dict[str, Any]
) -> None:
    suspected: list[int] = []
    aborts: list[bool] = []
    native.pg.abort = lambda: aborts.append(True)  # type: ignore[method-assign]
    manager = native.manager(**settings)
    manager._server.suspect = lambda quorum_id, others: suspected.append(quorum_id)  # type: ignore[method-assign]
    fail(manager, native)
    assert not manager.should_commit()
    assert aborts == [True]
    assert suspected == []


# Settings


@pytest.mark.parametrize(
    ("settings", "keeps"),
    [
        ({}, False),
        ({"replay_failed_step": True}, True),
        ({"replay_failed_step": True, "world_size_mode": WorldSizeMode.FIXED_WITH_SPARES}, False),
    ],
)
def test_with_a_loader_a_step_is_not_replayed_but_comes_again(
    fixture: Fixture, settings: dict[str, Any], keeps: bool
) -> None:
    manager = fixture.manager(**settings)
    sizes = dict(global_batch_size=4, micro_batch_size=2, data_rank=0, data_world_size=1)
    ElasticDataLoader(manager, list(range(10)), **sizes)
    assert manager._again.enabled is keeps
    assert not manager._replay.enabled


def test_a_second_loader_is_refused(fixture: Fixture) -> None:
    manager = fixture.manager()
    attach(manager)
    with pytest.raises(ValueError, match="has an ElasticDataLoader already"):
        attach(manager)


def test_a_loader_after_the_first_step_began_is_refused(fixture: Fixture) -> None:
    manager = fixture.manager()
    manager.start_quorum()
    with pytest.raises(ValueError, match="the first step has begun: make the ElasticDataLoader before"):
        attach(manager)


def test_other_averages_are_refused(fixture: Fixture) -> None:
    before, after = fixture.manager(), fixture.manager()
    before.register_layout("mine", ["weight float32[2]"])
    with pytest.raises(
        ValueError, match="tensors to average are registered already; with an ElasticDataLoader"
    ):
        attach(before)
    attach(after)
    with pytest.raises(
        ValueError, match="mine: with an ElasticDataLoader gradients are added; averages are for Local"
    ):
        after.register_layout("mine", ["weight float32[2]"])


class Steps:
    """LocalSGD's interface for a Manager."""

    keeps_own_weights = True
    entered = True

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("loader_first", [True, False])
def test_with_local_sgd_averages_are_divided(native: Fixture, loader_first: bool) -> None:
    manager = native.manager()
    for make in (attach, lambda m: m._data.attach_local_steps(Steps()))[:: 1 if loader_first else -1]:
        make(manager)
    manager.register_layout("LocalSGD", ["weight float32[2]"])
    announce_the_same(manager, native)
    manager.start_quorum()
    weight = torch.full((2,), 6.0)
    manager.allreduce(weight).wait()
    assert weight.tolist() == [3.0, 3.0]


# The check of a quorum


class Fake:
    rank = 0
    is_stream = False

    def __init__(self, plan: DataPlan, position: DataPosition) -> None:
        self.plan, self.position = plan, position

    @property
    def settings(self) -> list[str]:
        return []

    @property
    def digest(self) -> str:
        return self.plan.digest(self.position)

    def share(self, rank: Optional[int], participants: int) -> RankShare:
        return self.plan.share(self.position, rank, participants)

    def units_added(self) -> bool:
        return True

    def check_samples(self, counted: int, participants: int) -> None:
        self.share(None, participants).check(counted)

    def send_samples(self) -> int:
        return self.share(self.rank, 2).samples

    def verify(self) -> None:
        pass


class Done:
    def wait(self) -> bool:
        return True


class InQuorum:
    """A step of a group with this rank in a quorum of two groups."""

    error = None
    healing = False
    participants = 2

    def __init__(self, rank: int, quorum_id: int = 5, healing: int = 0, speeds: tuple[int, ...] = ()) -> None:
        self.rank = rank
        fields: dict[str, Any] = dict.fromkeys(QuorumPlan.__dataclass_fields__)
        fields.update(quorum_id=quorum_id, participating_rank=rank, participants=2, leads=rank == 0)
        fields.update(num_up_to_date=2, replica_world_size=2 + healing, speeds=speeds)
        self.plan = QuorumPlan(**fields)


def data_of(loader: Fake) -> Any:
    layout: Any = SimpleNamespace(lines=None, add=lambda *_: None)
    settings: Any = SimpleNamespace(reproducible_reduction=False, audit=0.0)
    planner: Any = SimpleNamespace()
    data, attached = Data(layout, planner, settings, True), cast(Any, loader)
    data.attach(attached, begun=False)
    return data


def verdicts(first: Fake, second: Fake, lost: int = 0) -> list[tuple[str, bool]]:
    """Returns the verdicts of two groups, and whether each has to heal, if this number of samples is
    missing.
    """
    first.rank, second.rank = 0, 1
    checks, steps = [data_of(first), data_of(second)], [InQuorum(0), InQuorum(1)]
    assert all(check.compares(step) for check, step in zip(checks, steps))
    words = [check.words(step, torch.device("cpu")) for check, step in zip(checks, steps)]
    sums = words[0] + words[1]
    sums[0] -= lost
    found: list[tuple[str, bool]] = []
    for check, step in zip(checks, steps):
        check.sent(sums, Done())
        assert not check.compares(step)
        later = (
            InQuorum(step.rank),
            InQuorum(step.rank, quorum_id=6),
            InQuorum(step.rank, healing=1),
            InQuorum(step.rank, speeds=(2, 1)),  # the batch is cut anew
        )
        assert [check.compares(one) for one in later] == [False, True, True, True]
        try:
            check.verify(step)
            found.append(("", check.step_to_announce(7) == 6))
        except (BatchDiffers, SamplesDiffer) as e:
            found.append((str(e), check.step_to_announce(7) == 6))
    return found


PLAN = DataPlan(length=10, global_batch_size=4, micro_batch_size=2)


def test_equal_groups_pass() -> None:
    assert verdicts(Fake(PLAN, DataPosition(0, 2)), Fake(PLAN, DataPosition(0, 2))) == [("", False)] * 2


def test_missing_samples_cost_the_step() -> None:
    found = verdicts(Fake(PLAN, DataPosition()), Fake(PLAN, DataPosition()), lost=2)
    message = "batch 0 of epoch 0: 2 samples were reduced, 4 belong to it; the step must not be committed"
    assert found == [(message, False)] * 2


@pytest.mark.parametrize(
    "other",
    [
        Fake(PLAN, DataPosition(0, 1)),
        *(
            Fake(plan, DataPosition())
            for plan in (
                replace(PLAN, length=11),
                replace(PLAN, seed=1),
                replace(PLAN, micro_batch_size=4),
                replace(PLAN, shuffle=False),
                replace(PLAN, epochs=2),
            )
        ),
    ],
)
def test_groups_that_differ_lose_the_step_and_the_first_one_counts(other: Fake) -> None:
    first, second = verdicts(Fake(PLAN, DataPosition()), other)
    assert "the 2 groups that take part do not train on the same batch" in first[0]
    assert [first[1], second[1]] == [False, True]
