"""A step of a loader comes again after a failure, and groups compute only the units of the failed group."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from typing import Any, Callable, Optional, cast

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed import ReduceOp

from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.integration.test_loader import SETTINGS, Training, check, dataset, make_model, make_optimizer
from torchft import Optimizer
from torchft._manager.step import collectives
from torchft.data import ElasticDataLoader
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.manager import Manager
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo
from torchft.work import _DummyWork

# 12 units in a batch: four groups compute 3 each, and the survivors of one 1 more.
LOADER = {"micro_batch_size": 1}
# As in test_replay.py: Gloo does not wake one send of a hundred when a peer fails.
OPERATION = timedelta(seconds=10)


@pytest.fixture(autouse=True)
def long_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_DRAIN_SEC", 20.0)


class Killed(Exception):
    """Ends the loop of the group that fails."""


class ReducesCopies(nn.Module):
    """As FSDP2 does, reduces tensors of its own after the backward pass, and copies the results to where the
    optimizer reads them.
    """

    def __init__(self, manager: Manager, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._group = ManagedProcessGroup(manager)
        self._syncs = self._queued = False
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def set_requires_gradient_sync(self, requires: bool) -> None:
        self._syncs = requires

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def _accumulated(self, _: torch.Tensor) -> None:
        if self._syncs and not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._reduce)  # type: ignore[arg-type]

    def _reduce(self) -> None:
        self._queued = False
        for parameter in self.net.parameters():
            assert parameter.grad is not None
            copy = parameter.grad.clone()
            self._group.allreduce([copy], ReduceOp.AVG).wait()
            parameter.grad.copy_(copy)


def pytorch_ddp(manager: Manager, net: nn.Module) -> nn.Module:
    group = cast(Any, ManagedProcessGroup(manager))
    return nn.parallel.DistributedDataParallel(net, process_group=group, find_unused_parameters=True)


KINDS: dict[str, Callable[[Manager, nn.Module], nn.Module]] = {
    "plain": lambda manager, net: net,
    "ddp": DistributedDataParallel,
    "copied gradients": lambda manager, net: DistributedDataParallel(
        manager, net, gradient_as_bucket_view=False
    ),
    "pure ddp": PureDistributedDataParallel,
    "pytorch's ddp": pytorch_ddp,
    "like FSDP2": ReducesCopies,
}


def wait_until_all_have_begun(rank: Rank) -> None:
    """While the quorum stands, a rank may be in a step that the others have not begun: without it, they would
    begin that step in another quorum.
    """
    assert rank.manager is not None
    step, deadline = rank.manager.current_step(), time.monotonic() + 60

    def has_begun(manager: Optional[Manager]) -> bool:
        if manager is None or manager.current_step() != step:
            return False
        return manager._current.undecided and manager._round is not None

    while not all(other.crashed or has_begun(other.manager) for other in rank.cluster.ranks):
        assert time.monotonic() < deadline, f"not all groups have begun step {step}"
        time.sleep(0.001)


def fails(place: str) -> Callable[[Rank], Optional[str]]:
    """Makes a rank fail at a place of the step whose units it has, when all groups have begun it."""

    def begin(rank: Rank) -> Optional[str]:
        manager = rank.manager
        assert manager is not None
        wait_until_all_have_begun(rank)
        if place == "forward":
            rank.crash()
            return "crashed"
        reduce, vote, left = manager.allreduce, manager.should_commit, [int(place[-1:] == "2") * 2]

        def allreduce(tensor: torch.Tensor, **more: Any) -> Any:
            if left[0] == 0 and place != "vote":
                rank.crash()
            left[0] -= 1
            return reduce(tensor, **more)

        def should_commit(*args: Any, **more: Any) -> bool:
            if not rank.crashed:
                vote(*args, **more)
                rank.crash()
            raise Killed

        manager.allreduce = allreduce  # type: ignore[method-assign]
        manager.should_commit = should_commit  # type: ignore[method-assign]
        return None

    return begin


@dataclass
class Job(Training):
    """Groups that replay, of which some fail."""

    settings: dict[str, Any] = field(default_factory=lambda: {"replay_failed_step": True})
    loader: dict[str, Any] = field(default_factory=LOADER.copy)

    def __call__(self, rank: Rank) -> Optional[torch.Tensor]:
        try:
            return super().__call__(rank)
        except Killed:
            return None

    def run(self, groups: int, world_size: int = 1, least: int = 2) -> list[Optional[torch.Tensor]]:
        self.start_with = groups
        with Cluster(min_replicas=least, make_pg=lambda _: ProcessGroupGloo(timeout=OPERATION)) as cluster:
            return results(*(cluster.start(self, group, world_size) for group in range(groups)))

    def computed(self, step: int) -> dict[int, list[int]]:
        """The units that each group computed in the attempts at a step."""
        return {group: units for (group, at), units in self.units.items() if at == step}


@pytest.mark.parametrize("place", ["forward", "bucket0", "bucket2"])
@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("plain", 4),
        ("like FSDP2", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("plain", 3), ("ddp", 3), ("ddp", 4), ("like FSDP2", 4))
        ),
    ],
)
def test_only_the_units_of_the_failed_group_are_computed_again(kind: str, groups: int, place: str) -> None:
    if kind == "ddp" and place == "bucket2":
        place = "bucket0"  # it has one bucket
    job = Job(wrap=KINDS[kind], events={(0, 0, 2): fails(place)})
    ended = job.run(groups)
    check(job, ended)
    assert sum(weights is not None for weights in ended) == groups - 1
    own, survivors = 12 // groups, range(1, groups)
    expected = [own, own // (groups - 1)]
    assert {group: job.computed(2)[group] for group in survivors} == dict.fromkeys(survivors, expected)
    assert all(len(units) == 1 for (_, step), units in job.units.items() if step != 2)


@pytest.mark.parametrize("groups", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", pytest.param("ddp", marks=pytest.mark.slow), "like FSDP2"])
def test_after_a_failure_behind_the_vote_no_unit_of_the_next_step_is_computed_twice(
    kind: str, groups: int
) -> None:
    """The others mostly have all results of step 1. Some begin step 2 in the standing quorum, and lose it."""
    job = Job(wrap=KINDS[kind], events={(0, 0, 1): fails("vote")})
    ended = job.run(groups)
    survivors = range(1, groups)
    committed_at_once = all(len(job.computed(1)[group]) == 1 for group in survivors)
    # the samples of a failed group are not recorded
    check(job, ended, incomplete=frozenset({1} if committed_at_once else ()))
    assert sum(weights is not None for weights in ended) == groups - 1
    assert sum(sum(job.computed(2)[group]) for group in survivors) == 12


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("pure ddp", 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in product(("copied gradients", "pure ddp", "pytorch's ddp"), (0, 1))
            if case != ("pure ddp", 1)
        ),
    ],
)
def test_other_ways_to_reduce_and_to_read(kind: str, workers: int) -> None:
    """With a worker process, units of a batch that comes again were read ahead."""
    job = Job(wrap=KINDS[kind], events={(0, 0, 2): fails("bucket0")})
    job.loader["num_workers"] = workers
    check(job, job.run(3))
    assert [job.computed(2)[group] for group in (1, 2)] == [[4, 2], [4, 2]]


@pytest.mark.slow
def test_one_failure_after_another_in_one_step() -> None:
    """Twelve units: four groups compute 3, then three compute 1 more. When the second group fails, two units
    of its four are left for each of the others.
    """
    job = Job(events={(0, 0, 2): fails("bucket0")})

    def fails_in_the_next_attempt(rank: Rank) -> Optional[str]:
        return fails("bucket0")(rank) if len(job.units.get((1, 2), [])) == 1 else None

    job.events[1, 0, 2] = fails_in_the_next_attempt
    check(job, job.run(4))
    assert [job.computed(2)[group] for group in (2, 3)] == [[3, 1, 2], [3, 1, 2]]


@pytest.mark.slow
def test_groups_that_fail_in_step_after_step() -> None:
    job = Job(events={(3, 0, 1): fails("bucket0"), (0, 0, 2): fails("bucket2"), (1, 0, 3): fails("forward")})
    check(job, job.run(4, least=1))  # the last batch of the epoch, that of step 3, has 5 units
    assert [job.computed(step)[2] for step in (1, 2, 3)] == [[3, 1], [4, 2], [3, 2]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in ({"use_async_quorum": False}, {"heal": "at_once"}, {"heal": "in_passing"})
        ),
    ],
    ids=repr,
)
def test_a_group_joins_in_the_quorum_that_continues_a_step(settings: dict[str, Any]) -> None:
    """It heals. If it has healed before the step, it computes a part of the missing units."""
    job, restart = Job(settings={"replay_failed_step": True, **settings}), Gate()

    def fail(rank: Rank) -> Optional[str]:
        crash = rank.crash
        rank.crash = lambda: (crash(), restart.open())[1]  # type: ignore[method-assign]
        return fails("bucket0")(rank)

    def wait_for_it(rank: Rank) -> None:
        manager = rank.manager
        assert manager is not None
        decide = manager.should_commit

        def should_commit(*args: Any, **more: Any) -> bool:
            committed = decide(*args, **more)
            if not committed:
                rank.cluster.wait_for_waiter(0)
            return committed

        if not job.lost:
            manager.should_commit = should_commit  # type: ignore[method-assign]

    job.events = {(0, 0, 2): fail, (1, 0, 2): wait_for_it, (2, 0, 2): wait_for_it}
    job.start_with = 3
    with Cluster(min_replicas=2, make_pg=lambda _: ProcessGroupGloo(timeout=OPERATION)) as cluster:
        first = [cluster.start(job, group) for group in range(3)]
        cluster.wait(restart)
        first[0][0].result(timeout=60)
        ended = results(*first, cluster.start(job, 0))
    check(job, ended)
    assert all(sum(job.computed(2)[group]) < 8 for group in (1, 2))


def test_a_group_behind_the_others_heals_and_forgets_what_it_keeps(caplog: pytest.LogCaptureFixture) -> None:
    """It alone has not committed the step."""
    votes: list[bool] = []

    def votes_no_once(rank: Rank) -> None:
        manager = rank.manager
        assert manager is not None
        vote = manager._server.vote

        def first_vote_is_no(step: int, yes: bool, timeout: timedelta) -> bool:
            votes.append(yes)
            return len(votes) > 1 and vote(step, yes, timeout)

        manager._server.vote = first_vote_is_no  # type: ignore[method-assign]

    job = Job(events={(1, 0, 2): votes_no_once})
    check(job, job.run(3), incomplete=frozenset({2}))
    assert votes[:2] == [True, True]
    assert "step 2 comes again without the 4 units of this group" in caplog.text
    assert "the kept gradients are of other weights" in caplog.text


def test_a_loop_that_does_not_reduce_all_again_loses_what_it_keeps(caplog: pytest.LogCaptureFixture) -> None:
    """The step must not be committed: kept gradients of the last parameter are not in the sum."""
    job = Job(events={(0, 0, 2): fails("bucket0")})

    def leaves_one_out(rank: Rank) -> None:
        manager, attempt = rank.manager, len(job.units.get((1, 2), []))
        assert manager is not None
        reduce, left = Manager.allreduce, [3]

        def allreduce(tensor: torch.Tensor, **more: Any) -> Any:
            left[0] -= 1
            return reduce(manager, tensor, **more) if left[0] >= 0 or attempt != 1 else _DummyWork(tensor)

        manager.allreduce = allreduce  # type: ignore[method-assign]

    job.events[1, 0, 2] = leaves_one_out
    check(job, job.run(3))
    assert "it reduced 3 tensors, and 4 in the attempt before" in caplog.text
    assert [job.computed(2)[group] for group in (1, 2)] == [[4, 2, 3], [4, 2, 3]]


def test_a_group_without_the_setting_keeps_nothing() -> None:
    job = Job(events={(0, 0, 2): fails("bucket0")})

    def loop(rank: Rank) -> Optional[torch.Tensor]:
        start = rank.start_manager
        if rank.group == 1:
            rank.start_manager = lambda **given: start(**{**given, "replay_failed_step": False})  # type: ignore[method-assign]
        return job(rank)

    job.start_with = 3
    with Cluster(min_replicas=2, make_pg=lambda _: ProcessGroupGloo(timeout=OPERATION)) as cluster:
        check(job, results(*(cluster.start(loop, group) for group in range(3))))
    assert [job.computed(2)[group] for group in (1, 2)] == [[4, 4], [4, 4]]


def test_a_collective_that_does_not_end_costs_nothing_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the tensor that was reduced, not its copy."""
    end = collectives.Collectives.end
    monkeypatch.setattr(collectives.Collectives, "end", lambda *given: bool(end(*given) and not given))
    job = Job(events={(0, 0, 2): fails("bucket0")})
    check(job, job.run(3))
    assert [job.computed(2)[group] for group in (1, 2)] == [[4, 2], [4, 2]]


def test_what_a_loop_reduces_by_itself() -> None:
    """A sum over the units of a step has those that are kept; a sum before the first unit has not."""
    sums: list[tuple[int, float, float, float]] = []

    def loop(rank: Rank) -> None:
        net = make_model()
        manager = rank.start_manager(
            load_state_dict=net.load_state_dict, state_dict=net.state_dict, replay_failed_step=True
        )
        optimizer = Optimizer(manager, make_optimizer(net))
        loader = ElasticDataLoader(manager, dataset(), **{**SETTINGS, **LOADER, "epochs": 1})
        rank.cluster.wait_for_healthy(3)
        for step in loader:
            groups, samples, after = torch.ones(1), torch.zeros(1), torch.ones(1)
            manager.allreduce(groups).wait()
            optimizer.zero_grad()
            for unit in step:
                with unit.accumulate(net):
                    (nn.functional.mse_loss(net(unit.data[0]), unit.data[1]) * unit.weight).backward()
                samples += len(unit.indices) if unit.weight else 0
            if rank.group == 0 and manager.current_step() == 1:
                rank.crash()
                return
            for reduced in (samples, *(p.grad for p in net.parameters() if p.grad is not None)):
                manager.allreduce(reduced).wait()
            optimizer.step()
            manager.allreduce(after).wait()
            if step.committed:
                sums.append((manager.current_step(), groups.item(), samples.item(), after.item()))

    with Cluster(min_replicas=2, make_pg=lambda _: ProcessGroupGloo(timeout=OPERATION)) as cluster:
        results(*(cluster.start(loop, group) for group in range(3)))
    assert set(sums) == {(1, 3, 12, 3), (2, 2, 12, 2), (3, 2, 12, 2), (4, 2, 5, 2)}


def test_with_reproducible_reduction_nothing_is_kept() -> None:
    job = Job(
        settings={"replay_failed_step": True, "reproducible_reduction": True},
        events={(0, 0, 2): fails("bucket0")},
    )
    check(job, job.run(3))
    assert [job.computed(2)[group] for group in (1, 2)] == [[4, 6], [4, 6]]
