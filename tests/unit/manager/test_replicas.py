"""Groups in one thread, with real optimizers, digests and messages; the test itself sums the messages.

Random bits flip in weights and optimizer states. Each flip that persists is found in time and reported with
its group and tensor, and the group heals.
"""

from __future__ import annotations

import copy
import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Optional, cast
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.bounded import todays
from torchft._agreement import COMPARES, announce
from torchft._manager.checks.replicas import Digester, RegisteredState, Replicas, _Sent
from torchft._manager.rank import RankState
from torchft._manager.settings import OnDivergence
from torchft.checkpointing.codec.digest import combine, digest, memory_of

GROUPS = 3
RANK_STATE = RankState(timedelta(seconds=7))


class Group:
    """A rank of a group: parameters, an optimizer, and the comparison."""

    def __init__(self, rank: int, setting: Optional[int], action: OnDivergence = OnDivergence.HEAL) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
        self.model.get_buffer("1.running_mean").fill_(rank)  # depends on the group's own data
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.rank = rank
        self.logger = MagicMock()
        errors = SimpleNamespace(lose=self.lose)
        self.replicas = Replicas(
            setting, action, rank_state=RANK_STATE, errors=cast(Any, errors), logger=self.logger
        )
        self.replicas.state.add_parameters(self.model.named_parameters)
        self.replicas.state.add_optimizer(self.optimizer)
        self.handle = announce('{"id": "a handle"}', ((COMPARES, self.replicas.announces(averages=False)),))
        self.healing = False
        self.step: Any = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors whose bits may flip, in the order in which they are digested."""
        named = {}
        for name, parameter in self.model.named_parameters():
            named[name] = parameter.data
            for key in sorted(self.optimizer.state[parameter]):
                named[f"{name}: {key}"] = self.optimizer.state[parameter][key]
        return named

    def lose(self, error: Exception) -> None:
        self.step.error = SimpleNamespace(original_exception=error)

    def heal(self, source: Group) -> None:
        self.model.load_state_dict(source.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))
        self.healing = True  # in the next step

    def reported(self) -> list[tuple[int, list[str], list[str], bool]]:
        """Returns and clears the steps, groups and tensors of the reported differences."""
        calls = [call.args[1:] for call in self.logger.divergence_event.call_args_list]
        self.logger.divergence_event.reset_mock()
        return calls


class Job:
    """Runs steps with random gradients that are the same in all groups."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.number = 0
        self.plan = SimpleNamespace(
            quorum_id=1,
            replica_world_size=len(groups),
            replica_ids=[f"group_{group.rank}" for group in groups],
            handles=[group.handle for group in groups],
        )

    def step(self) -> None:
        """Runs a step, which each group commits unless the comparison makes it heal."""
        tables = [table for group in self.groups for table in self.begin(group)]
        if tables:
            total = torch.stack(tables).sum(0)
            for table in tables:
                table.copy_(total)
        committing = [group for group in self.groups if self.votes(group)]
        for group in self.groups:
            group.healing = group.replicas.gives_way(group.step)
            if group not in committing:
                group.heal(committing[0])  # its weights belong to the same step
        generator = torch.Generator().manual_seed(self.number)
        gradients = [torch.randn(p.shape, generator=generator) for p in self.groups[0].model.parameters()]
        for group in self.groups:
            for parameter, gradient in zip(group.model.parameters(), gradients):
                parameter.grad = gradient.clone()
            group.optimizer.step()
        self.number += 1

    def begin(self, group: Group) -> list[torch.Tensor]:
        """The first reduction of a step. Returns the message that is sent with it."""
        plan = SimpleNamespace(**vars(self.plan), replica_rank=self.groups.index(group), heal=group.healing)
        group.step = cast(
            Any, SimpleNamespace(plan=plan, error=None, healing=group.healing, inputs=MagicMock())
        )
        group.replicas.follow(cast(Any, plan))
        message = group.replicas.message(group.step, self.number, torch.device("cpu"))
        if message is None:
            return []
        group.replicas.sent(cast(Any, SimpleNamespace(wait=lambda: True)))
        assert group.replicas.message(group.step, self.number, torch.device("cpu")) is None
        return [message]

    def votes(self, group: Group) -> bool:
        group.replicas.check(group.step, self.number)
        return group.step.error is None

    def equal(self) -> bool:
        digests = ([digest(tensor) for tensor in group.tensors().values()] for group in self.groups)
        return len({int(combine(each)) for each in digests}) == 1


def flip(tensor: torch.Tensor, bit: int) -> None:
    memory = memory_of(tensor)
    memory[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("flips", [20, pytest.param(1000, marks=pytest.mark.slow)])  # slow: more flips
def test_flipped_bits_are_found_named_and_healed(flips: int) -> None:
    choose, sweep = random.Random(todays(20)), 3
    job = Job([Group(rank, sweep) for rank in range(GROUPS)])
    within = sweep + sweep  # a sweep, and the steps until the next message
    reverted = 0
    for _ in range(4):
        job.step()
    for number in range(flips):
        for _ in range(choose.randrange(sweep)):
            job.step()
        group = choose.choice(job.groups)
        name, tensor = choose.choice(sorted(group.tensors().items(), key=lambda item: item[0]))
        flipped_at = job.number
        # Of Adam's step count only low bits flip: with a negative count, or NaN, the optimizer itself fails
        flip(tensor, choose.randrange(23 if name.endswith(": step") else 32 * tensor.numel()))
        assert not job.equal()
        reported: list[Any] = []
        for _ in range(within):
            job.step()
            reported = [reported for each in job.groups for reported in each.reported()]
            if reported:
                break
        if not reported:  # the optimizer's rounding undid the flip before this tensor was digested
            assert job.equal(), f"flip {number} of {name}"
            reverted += 1
            continue
        assert len(reported) == GROUPS  # by all groups
        for step, groups, tensors, certain in reported:
            assert groups == [f"group_{group.rank}"] and certain
            assert flipped_at <= step < flipped_at + sweep
            assert name.split(":")[0] in [
                each.split(":")[0] for names in tensors for each in names.split(", ")
            ]
        assert [each.logger.counted.call_count for each in job.groups] == [
            each is group for each in job.groups
        ]
        group.logger.counted.reset_mock()
        assert job.equal()  # healed
        job.step()
        assert not any(each.reported() for each in job.groups)
    assert reverted <= max(3, flips / 10)


def test_flipped_bits_in_two_groups_of_five() -> None:
    job = Job([Group(rank, 6) for rank in range(5)])
    for _ in range(8):
        job.step()
    for rank, name in ((1, "0.weight"), (3, "2.bias")):
        flip(job.groups[rank].tensors()[name], 22)
    for _ in range(12):
        job.step()
    assert job.equal()
    named = {group for _, groups, _, certain in job.groups[0].reported() for group in groups if certain}
    assert named == {"group_1", "group_3"}


def test_state_that_differs_between_groups_by_design_is_not_compared() -> None:
    """For example the running statistics of a BatchNorm, which are buffers, not parameters."""
    job = Job([Group(rank, 3) for rank in range(GROUPS)])
    for _ in range(12):
        job.step()
    assert not any(group.reported() for group in job.groups)


@pytest.mark.parametrize("setting", [None, 1, 250])
def test_the_length_of_a_sweep_is_kept(setting: Optional[int]) -> None:
    sweep = setting or 100
    job = Job([Group(rank, setting) for rank in range(GROUPS)])
    for _ in range(sweep + 3):
        job.step()
    flip(job.groups[2].tensors()["2.weight"], 32 * 20 + 31)
    steps = 0
    while not job.groups[0].reported():
        job.step()
        steps += 1
        assert steps <= sweep + 11
    assert job.groups[0].replicas._digester._sweep.commits == sweep


def test_a_checkpoint_is_loaded_in_all_groups() -> None:
    """Digests of the weights before the load are not sent."""
    job = Job([Group(rank, 4) for rank in range(GROUPS)])
    for _ in range(10):
        job.step()
    flip(job.groups[1].tensors()["0.bias"], 3)
    job.step()
    for group in job.groups:
        group.model.load_state_dict(job.groups[0].model.state_dict())
        group.optimizer.load_state_dict(copy.deepcopy(job.groups[0].optimizer.state_dict()))
    job.number = 7
    for _ in range(10):
        job.step()
    assert not any(group.reported() for group in job.groups)


def test_weights_that_a_heal_replaced_are_not_compared() -> None:
    job = Job([Group(rank, 8) for rank in range(GROUPS)])
    for _ in range(17):
        job.step()
    flip(job.groups[1].tensors()["0.weight"], 3)
    for _ in range(3):
        job.step()
    job.groups[1].heal(job.groups[0])  # for another reason
    for _ in range(20):
        job.step()
    assert job.equal()
    assert not any(group.reported() for group in job.groups)


def test_after_an_error_in_its_digests_a_group_trains_on_without_comparison() -> None:
    job = Job([Group(rank, 2) for rank in range(GROUPS)])

    def broken() -> Any:
        raise OSError("no tensors today")

    job.groups[1].replicas.state.add_parameters(broken)
    for _ in range(6):
        job.step()
    job.groups[1].logger.exception.assert_called_once()
    flip(job.groups[2].tensors()["0.weight"], 3)
    for _ in range(6):
        job.step()
    (reported, *_) = job.groups[0].reported()
    # Of two groups, it is unknown which is right.
    assert reported[1] == ["group_0", "group_2"] and not reported[3]


def test_groups_with_other_tensors_are_reported_once() -> None:
    job = Job([Group(rank, 2) for rank in range(GROUPS)])
    job.groups[1].replicas.state.add_parameters(lambda: [("more", torch.zeros(3))])
    for _ in range(8):
        job.step()
    warned = [call.args[0] for call in job.groups[0].logger.warn.call_args_list]
    assert len(warned) == 1 and "group_1" in warned[0]
    assert not any(group.reported() for group in job.groups)


def test_a_group_without_a_source_votes_yes_after_three_failed_steps() -> None:
    """If no group commits, a group that differs has no source to heal from: after three attempts it
    continues.
    """
    job = Job([Group(rank, 1) for rank in range(GROUPS)])
    for _ in range(3):
        job.step()
    group = job.groups[1]
    flip(group.tensors()["0.bias"], 3)
    job.step()
    votes = []
    for _ in range(5):
        tables = [table for each in job.groups for table in job.begin(each)]
        total = torch.stack(tables).sum(0)
        for table in tables:
            table.copy_(total)
        votes.append([job.votes(each) for each in job.groups])
    assert votes == [[True, False, True]] * 3 + [[True, True, True]] * 2


def _header(digester: Digester) -> int:
    digests = digester.digest(1)
    assert digests is not None
    return digests.header


def test_empty_entries_of_the_optimizer_state_are_not_counted() -> None:
    """An optimizer that reads `state[parameter]` before its first step makes them. The state that it gets
    later is listed at once, as in a group that heals.
    """
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter])
    state = RegisteredState()
    state.add_optimizer(optimizer)
    digester = Digester(state, 10)
    before = state.counts()
    assert optimizer.state[parameter] == {} and state.counts() == before
    digester.digest(0)
    parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.state["other"] = 3  # type: ignore[index]
    assert state.counts() != before
    healed = RegisteredState()
    healed.add_optimizer(optimizer)
    assert _header(digester) == _header(Digester(healed, 10))


def test_no_comparison_without_something_to_compare() -> None:
    replicas = Replicas(
        None, OnDivergence.REPORT, rank_state=RANK_STATE, errors=MagicMock(), logger=MagicMock()
    )
    assert replicas.announces(averages=False) == ""


@pytest.mark.parametrize(("setting", "averages"), [(0, False), (None, True)])
def test_groups_that_compare_nothing_announce_nothing(setting: Optional[int], averages: bool) -> None:
    replicas = Replicas(
        setting,
        OnDivergence.REPORT,
        rank_state=RANK_STATE,
        errors=MagicMock(),
        logger=MagicMock(),
    )
    replicas.state.add_parameters(list)
    assert replicas.announces(averages) == ""


def test_the_names_of_parameters() -> None:
    """The model's names, else the optimizer's, else the position in the optimizer."""
    model = nn.Linear(2, 2)
    plain, named = RegisteredState(), RegisteredState()
    plain.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    named.add_parameters(lambda: [*model.named_parameters(), ("again", model.weight)])
    named.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert [part.name for part in plain.parts()] == [
        "optimizer 0, param_groups[0]['params'][0]",
        "optimizer 0, param_groups[0]['params'][1]",
    ]
    assert [part.name for part in named.parts()] == ["weight", "bias"]


def test_numbers_and_tensors_of_any_kind_are_digested() -> None:
    """Optimizers keep numbers, None, scalars and sparse tensors in their state."""
    parameter = nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {
        "steps": 3,
        "average": torch.tensor(1.0),
        "none": None,
        "sparse": torch.eye(2).to_sparse(),
        "half": torch.randn(5).to(torch.bfloat16),
        "text": "x",
    }
    state = RegisteredState()
    state.add_optimizer(optimizer)
    digester = Digester(state, 1)
    before = digester.digest(0)
    assert digester.digest(1).words.tolist() == before.words.tolist()
    optimizer.state[parameter]["steps"] = 4
    assert digester.digest(2).words.tolist() != before.words.tolist()
    del optimizer.state[parameter]["steps"]  # the list of tensors is rebuilt in the next sweep
    assert digester.digest(2).words.tolist() != before.words.tolist()


def test_the_local_shard_of_a_dtensor_is_digested() -> None:
    """The digests equal those of plain tensors with the same bits, for parameters and Adam's state."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, sweep = init_device_mesh("cpu", (1,)), 4
        values = [torch.randn(4, 6), torch.randn(5)]
        plain = [nn.Parameter(value.clone()) for value in values]
        sharded = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
        gradients = [torch.randn_like(value) for value in values]
        digesters = []
        for shards, parameters in ((False, plain), (True, sharded)):
            optimizer = torch.optim.AdamW(parameters, lr=1e-2)
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)]) if shards else gradient.clone()
            optimizer.step()
            state = RegisteredState()
            state.add_optimizer(optimizer)
            digesters.append(Digester(state, sweep))
        first = [[digester.digest(step).words.tolist() for step in range(sweep)] for digester in digesters]
        assert first[0] == first[1]
        for tensor in (sharded[0], optimizer.state[sharded[1]]["exp_avg_sq"]):
            before = [digesters[1].digest(step).words.tolist() for step in range(sweep)]
            flip(tensor, 77)
            after = [digesters[1].digest(step).words.tolist() for step in range(sweep)]
            assert sum(one != other for one, other in zip(before, after)) == 1, "one part covers the bit"
    finally:
        dist.destroy_process_group()


def test_a_device_that_never_copies_a_message_is_not_waited_for_longer_than_the_timeout() -> None:
    """Called before the vote of each step, on the training thread."""
    group = Group(0, 1)
    mark = MagicMock()
    mark.wait.return_value = False
    table = torch.zeros(1)
    group.replicas._copied = _Sent(10, MagicMock(), table, mark=mark)
    group.step = SimpleNamespace(error=None, healing=False, plan=None)
    group.replicas.check(group.step, 11)
    mark.wait.assert_called_once_with(7.0)
    (line,) = group.logger.warn.call_args.args
    assert "the device has not copied a message in 7 s" in line
