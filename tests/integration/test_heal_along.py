"""A group that joins trains along while its state arrives in parts: then all groups have the same bits."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Optional

import pytest
import torch
from torch import nn, optim
from torch.utils._pytree import tree_map_only

from tests.integration.cluster import DEADLINE, Cluster, Gate, Rank, results
from tests.integration.test_divergence import WITHIN, Flip, Training, names, run
from tests.integration.test_divergence import reported as reported
from tests.integration.test_replay import DRAIN_SEC, OPERATION
from torchft._manager.heal import in_passing_rules, joining
from torchft._manager.heal import mode as modes
from torchft._manager.heal.in_passing_rules import Ask, Heal
from torchft._manager.heal.mode import Figures
from torchft._manager.settings import HealMode
from torchft._manager.step import collectives
from torchft.checkpointing import HTTPTransport
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

State = dict[str, Any]
AUTO = {"heal": "auto", "heal_along": None}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as built:
        yield built


PART = 64  # elements; the model below has 11 parts
NEXT, ARRIVED, COMPARED = Heal.next, Heal.arrived, Heal.compared


@pytest.fixture(autouse=True)
def one_part_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of this size, one in each step."""
    for size in ("FIRST", "LEAST", "MOST"):
        monkeypatch.setattr(in_passing_rules, size, PART)
    in_step: dict[Heal, Optional[int]] = {}

    def following(heal: Heal) -> Ask:
        return Ask(0, 0, 0, 0) if in_step.get(heal) == heal.step else NEXT(heal)

    def arrived(heal: Heal, ask: Ask, share: float) -> None:
        in_step[heal] = heal.step
        ARRIVED(heal, ask, share)

    def compared(heal: Heal, ask: Ask, equal: bool) -> None:
        in_step[heal] = heal.step
        COMPARED(heal, ask, equal)

    monkeypatch.setattr(Heal, "next", following)
    monkeypatch.setattr(Heal, "compared", compared)
    monkeypatch.setattr(Heal, "arrived", arrived)


# The parts are compared once all are here, two in a step, and the rest of the state arrives after that.
LEAST_ROUNDS = 18


def halfway(cluster: Cluster, group: int) -> bool:
    """Whether some parts of a group are in place, and others are not."""
    managers = [rank.manager for rank in cluster.ranks if rank.group == group]
    target = managers[0]._in_passing._target if managers and managers[0] else None
    return target is not None and target.wrote and target.heal.here < target.heal.total - 5 * PART


@dataclass
class Loop:
    """Trains a small model with Adam until some groups have committed some steps together, and keeps
    their final state.
    """

    together: int = 3  # number of groups
    steps: int = 5  # number of steps that these groups commit together
    # Or several in a tuple.
    make: Callable[[nn.Module], Any] = lambda model: optim.Adam(model.parameters(), lr=0.01)
    model: Callable[[], nn.Module] = lambda: nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1)
    )
    device_of: Callable[[Rank], torch.device] = lambda rank: torch.device("cpu")
    settings: dict[str, Any] = field(default_factory=dict)
    initial: int = 1  # number of groups at step 0, if they have several ranks
    # Called in each round once its step is known.
    agreed: Callable[[nn.Module, int], None] = lambda model, step: None
    # Called at the start of each round of the loop.
    begun: Callable[[Rank, int], None] = lambda rank, round: None
    quorum: Callable[[Rank], None] = lambda rank: None  # called in each round once its quorum is known
    reduced: Callable[[Rank, int], None] = lambda rank, round: None
    counts: Callable[[Manager], bool] = lambda manager: True  # whether a step can be the first of these steps
    # Number of rounds until a group committed its first step.
    joined: dict[int, int] = field(default_factory=dict)
    histories: dict[int, list[tuple[int, bool, int]]] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> Optional[tuple[int, State]]:
        with_seed = torch.Generator().manual_seed(rank.group)
        model = self.model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=with_seed))
        device = self.device_of(rank)
        model.to(device)
        made = self.make(model)
        inner = made if isinstance(made, tuple) else (made,)
        schedules = [optim.lr_scheduler.ExponentialLR(one, 0.9) for one in inner]

        def load(state: State) -> None:
            model.load_state_dict(state["model"])
            for one, of in zip([*inner, *schedules], state["optimizers"] + state["schedules"]):
                one.load_state_dict(of)

        def save() -> State:
            states = [[one.state_dict() for one in several] for several in (inner, schedules)]
            return {"model": model.state_dict(), "optimizers": states[0], "schedules": states[1]}

        settings = {"heal_along": True, "load_state_dict": load, "state_dict": save, **self.settings}
        manager = rank.start_manager(**settings)
        optimizers = [OptimizerWrapper(manager, one) for one in inner]
        manager.register_replay_hook(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0) and None)
        log = self.histories[rank.group] = []
        manager.register_commit_hook(lambda *decision: log.append(decision))
        last: Optional[int] = None
        round = 0
        while last is None or manager.current_step() < last:
            self.begun(rank, round)
            if rank.crashed:
                return None
            for optimizer in optimizers:
                optimizer.zero_grad()
            manager.wait_quorum()
            self.agreed(model, manager.current_step())
            self.quorum(rank)
            if rank.crashed:
                return None
            data = torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank.group + round))
            model(data.to(device)).square().mean().backward()
            works = [manager.allreduce(p.grad) for p in model.parameters() if p.grad is not None]
            for work in works:
                work.wait()
            self.reduced(rank, round)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = manager.current_step()
            for optimizer, schedule in zip(optimizers, schedules):
                step = manager.current_step()
                optimizer.step()
                if manager.current_step() > step:
                    schedule.step()
            if manager.current_step() > before:
                self.joined.setdefault(rank.group, round)
                if last is None and manager.num_participants() >= self.together and self.counts(manager):
                    last = manager.current_step() + self.steps
            round += 1
            assert round < 20_000
        first = rank.group == rank.rank % self.initial  # all other groups heal from it at step 0
        assert manager.recovery_seconds()["load"] > 0 or first or manager.current_step() < 3
        final = {key: value for key, value in save().items() if key != "schedules"}
        return manager.current_step(), tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), final)


def _same(ours: Any, theirs: Any, path: str = "") -> None:
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key, value in ours.items():
            # the statistics of a BatchNorm: each group has its own, from its own forward passes
            if "running_" not in str(key) and "num_batches" not in str(key):
                _same(value, theirs[key], f"{path}.{key}")
    elif isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            _same(one, other, path)
    elif isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs), path
    else:
        assert ours == theirs, path


def _run(
    cluster: Cluster,
    loop: Loop,
    first: int,
    later: int,
    gate: Optional[Gate] = None,
    ranks: int = 1,
    same: bool = True,
) -> list[Any]:
    begun = loop.begun
    steps = gate or Gate()

    def watched(rank: Rank, round: int) -> None:
        if rank.group == 0 and round == 5:
            steps.open()
        if rank.group < first and round == 0:
            cluster.wait_for_healthy(first)
        if rank.group < first and round == 6:
            cluster.wait_for_healthy(first + later)
        begun(rank, round)

    loop.begun = watched
    groups = [cluster.start(loop, group, ranks) for group in range(first)]
    cluster.wait(steps)
    groups += [cluster.start(loop, first + i, ranks) for i in range(later)]
    found = [one for one in results(*groups) if one is not None]
    for number, one in enumerate(found):
        assert one[0] == found[0][0]
        if same:
            _same(found[number % ranks][1], one[1])
    return found


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_group_that_joins_has_the_same_bits_and_the_others_lose_no_step(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, use_async_quorum: bool
) -> None:
    steps: list[int] = []

    def begun(rank: Rank, round: int) -> None:
        if rank.group == 1 and 1 not in loop.joined:
            assert rank.manager is not None
            steps.append(rank.manager.current_step())

    loop = Loop(together=2, begun=begun, settings={"use_async_quorum": use_async_quorum})
    with caplog.at_level(logging.INFO):
        _run(cluster, loop, first=1, later=1)
    assert loop.joined[1] >= LEAST_ROUNDS, "its state came in parts over some steps"
    first, *_ = loop.histories[1][loop.joined[1]]
    assert all(participants == 1 + (step > first) for step, _, participants in loop.histories[0])
    assert set(steps) == {0}, (
        "between two steps it tells the step of its own weights, as docs/healing.md says"
    )
    assert all(committed for _, committed, _ in loop.histories[0])
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING and "is lost" in r.getMessage()]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True),
        pytest.param(
            lambda model: optim.AdamW(model.parameters(), lr=0.01, fused=True), marks=pytest.mark.slow
        ),
        pytest.param(lambda model: optim.Adagrad(model.parameters(), lr=0.01), marks=pytest.mark.slow),
        lambda model: optim.RMSprop(
            [
                {"params": model[0].parameters(), "lr": 0.1},
                {"params": [*model[1].parameters(), *model[3].parameters()]},
            ]
        ),
    ],
)
def test_other_optimizers(cluster: Cluster, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    _run(cluster, Loop(together=2, make=make), first=1, later=1)
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


@pytest.mark.slow
def test_two_groups_join_two(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(together=4)
    _run(cluster, loop, first=2, later=2)
    assert loop.joined[2] >= LEAST_ROUNDS and loop.joined[3] >= LEAST_ROUNDS
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


@pytest.mark.slow
def test_a_group_that_takes_no_part_in_a_heal_waits_in_the_same_step(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A target has a source and three additional ones: the fifth group neither heals nor serves."""
    _run(cluster, Loop(together=6), first=5, later=1)
    lost = ("transferred at once", "is lost", "timed out")
    assert not [r for r in caplog.records if any(text in r.getMessage() for text in lost)]


@dataclass
class TwoRanks(Loop):
    """The second rank of a group has a larger model, or another optimizer."""

    second: dict[str, Any] = field(default_factory=dict)  # fields of Loop

    def __call__(self, rank: Rank) -> Optional[tuple[int, State]]:
        given = {key: value for key, value in self.__dict__.items() if key != "second"}
        return Loop(**{**given, **(self.second if rank.rank == 1 else {})})(rank)


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_ranks_of_a_group_end_a_heal_in_one_step(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, use_async_quorum: bool
) -> None:
    """The first rank has its parts much earlier, and trains along until the other one has its own."""
    wide = {"model": lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))}
    loop = TwoRanks(together=2, second=wide, settings={"use_async_quorum": use_async_quorum})
    _run(cluster, loop, first=1, later=1, ranks=2)
    assert loop.joined[1] >= 20, "the second rank has so many parts"
    assert all(committed for _, committed, _ in loop.histories[0])
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def _two(model: nn.Module) -> tuple[optim.Optimizer, ...]:
    """An optimizer for the first layer, and another one for the others."""
    first, *others = model.children()
    rest = [parameter for layer in others for parameter in layer.parameters()]
    return optim.Adam(first.parameters(), lr=0.01), optim.SGD(rest, lr=0.01, momentum=0.9)


def test_the_ranks_of_a_group_heal_at_once_with_two_optimizers(cluster: Cluster) -> None:
    """Both share a step of the Manager: one quorum, and one vote."""
    loop = Loop(together=2, make=_two, settings={"heal": "at_once", "heal_along": None})
    _run(cluster, loop, first=1, later=1, ranks=2)
    assert all(committed for _, committed, _ in loop.histories[1])


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_optimizers(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, ranks: int, use_async_quorum: bool
) -> None:
    loop = Loop(together=2, make=_two, settings={"use_async_quorum": use_async_quorum})
    _run(cluster, loop, first=1, later=1, ranks=ranks)
    assert loop.joined[1] >= LEAST_ROUNDS, "its state came in parts over some steps"
    assert all(committed for _, committed, _ in loop.histories[0])
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def _one_of_its_own(model: nn.Module) -> tuple[optim.Optimizer, ...]:
    first, *others = model.children()
    rest = [parameter for layer in others for parameter in layer.parameters()]
    return optim.SGD(first.parameters(), lr=0.01, momentum=0.9), _Own(rest, lr=0.01)


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_optimizer_that_cannot_step_in_parts_comes_at_the_end(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """The parameters of the other one are healed in passing, also if their source fails meanwhile."""

    def crashes(rank: Rank, round: int) -> None:
        if fails and rank.group < 2 and not crashed and halfway(cluster, 2):
            assert rank.manager is not None
            plan = rank.manager._current.plan
            if plan is not None and plan.recover_dst:
                crashed.append(rank.group)
                rank.crash()

    def counts(manager: Manager) -> bool:
        plan = manager._current.plan
        return not fails or (bool(crashed) and plan is not None and len(plan.replica_ids) == 2)

    crashed: list[int] = []
    loop = Loop(together=2 if fails else 3, make=_one_of_its_own, begun=crashes, counts=counts)
    found = _run(cluster, loop, first=2, later=1)
    assert len(found) == 3 - fails and len(crashed) == fails
    assert loop.joined[2] >= 14, "the 544 elements of the first layer came in parts"
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def test_a_vote_that_is_no_step_of_an_optimizer(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """With several optimizers the target has to know which one steps."""

    def votes(rank: Rank, round: int) -> None:
        if rank.group == 1 and not voted and halfway(cluster, 1):
            assert rank.manager is not None
            voted.append(round)
            rank.manager.should_commit()

    voted: list[int] = []
    _run(cluster, Loop(together=2, make=_two, reduced=votes), first=1, later=1)
    logged = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert len(logged) == 1 and "a vote was not the step of one" in logged[0]


@pytest.mark.parametrize("fails", ["report", "future"])
def test_an_error_between_the_steps_of_two_optimizers_changes_no_decision(
    cluster: Cluster, fails: str
) -> None:
    """Both share a step of the Manager: what one group does not step, the others must not step either."""

    def loop(rank: Rank) -> tuple[int, list[list[float]]]:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
        manager = rank.start_manager(
            load_state_dict=lambda state: [p.data.copy_(x) for p, x in zip(parameters, state)] and None,
            state_dict=lambda: [p.data.clone() for p in parameters],
        )
        wrappers = [OptimizerWrapper(manager, optim.SGD([p], lr=0.1)) for p in parameters]
        cluster.wait_for_healthy(2)
        while manager.current_step() < 8:
            for wrapper in wrappers:
                wrapper.zero_grad()
            manager.wait_quorum()
            for parameter in parameters:
                parameter.grad = torch.full((2,), float(manager.current_step() + 1))
                manager.allreduce(parameter.grad).wait()
            late: torch.futures.Future[int] = torch.futures.Future()
            wrapped = manager.wrap_future(late, 0)
            wrappers[0].step()
            if rank.group == 1 and manager.current_step() == 4:
                error = RuntimeError("could not be logged")
                if fails == "report":
                    manager.report_error(error)
                else:
                    late.set_exception(error)
                    wrapped.wait()
            if not late.done():
                late.set_result(0)
            wrappers[1].step()
        return manager.current_step(), [p.data.tolist() for p in parameters]

    first, second = results(*[cluster.start(loop, number) for number in range(2)])
    assert first == second


def test_if_one_rank_of_a_group_gives_up_all_of_them_do(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    loop = TwoRanks(together=2, second={"make": lambda model: _Own(model.parameters())})
    with caplog.at_level(logging.INFO):
        _run(cluster, loop, first=1, later=1, ranks=2)
    logged = [r for r in caplog.records if "transferred at once" in r.getMessage()]
    own = {r.levelno for r in logged if "the optimizer is _Own" in r.getMessage()}
    others = {
        r.levelno for r in logged if "another rank of this group needs the whole state" in r.getMessage()
    }
    assert (own, others) == ({logging.WARNING}, {logging.INFO})  # one warning is enough


def test_weights_that_may_be_needed_are_kept(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """A group loses a step that the only other group commits. If the other group failed during the heal, the
    weights of the first one would still be needed.
    """

    def fails(rank: Rank, round: int) -> None:
        manager = rank.manager
        assert manager is not None
        if rank.group == 1 and round > 5 and not heals:
            if manager._current.healing:
                heals.append(manager.current_step())
            elif (
                manager.num_participants() == 2 and round % 5 == 0
            ):  # again, if the other one heard of it before its vote
                manager.report_error(RuntimeError("a bad batch"))

    heals: list[int] = []
    # Waits until both have healed: otherwise they would end at different steps.
    loop = Loop(
        together=2,
        reduced=fails,
        counts=lambda manager: bool(heals) and manager.current_step() > heals[0] + 3,
    )
    _run(cluster, loop, first=2, later=0)
    assert heals and heals[0] > 0
    logged = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert len(logged) == 1 and "one group alone has it" in logged[0]


def test_a_step_that_failed_meanwhile_is_not_applied(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The source reports errors while some parts are in place."""

    def fails(rank: Rank, round: int) -> None:
        assert rank.manager is not None
        if rank.group == 0 and len(failed) < 3 and halfway(cluster, 1):
            failed.append(round)
            rank.manager.report_error(RuntimeError("a bad batch"))

    failed: list[int] = []
    loop = Loop(together=2, reduced=fails)
    _run(cluster, loop, first=1, later=1)
    lost = [step for step, committed, _ in loop.histories[0] if not committed]
    assert len(lost) == len(failed) == 3
    assert loop.joined[1] >= LEAST_ROUNDS
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def test_an_error_of_the_group_that_heals_costs_one_quorum(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """After the error, the next quorum has new connections. Later steps keep these connections, although the
    healing group does not commit those steps either.
    """

    def fails(rank: Rank, round: int) -> None:
        assert rank.manager is not None
        plan = rank.manager._current.plan
        if rank.group == 0 and plan is not None and plan.replica_world_size == 2:
            quorums.add(plan.quorum_id)
        if rank.group == 1 and not failed and halfway(cluster, 1):
            failed.append(round)
            rank.manager.report_error(RuntimeError("a bad batch"))

    failed: list[int] = []
    quorums: set[int] = set()
    loop = Loop(together=2, reduced=fails)
    _run(cluster, loop, first=1, later=1)
    assert len(failed) == 1 and len(quorums) == 2
    assert all(committed for _, committed, _ in loop.histories[0])
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


@pytest.mark.slow
def test_a_group_that_differs_heals_along(reported: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """One bit of one of three groups flips. The others find it, and train on while that group heals."""
    settings = {"on_divergence": "heal", "heal_along": True}
    training = Training([Flip(7, 1, 0, 20)], steps=7 + 12 * WITHIN, settings=settings)
    with caplog.at_level(logging.INFO):
        run(training)
    assert len(set(training.ended.values())) == 1
    assert {(*names(record), record.certain) for record in reported} == {("group_1", True)}
    in_passing, whole = (
        [r for r in caplog.records if what in r.getMessage()]
        for what in ("training along", "transferred at once")
    )
    # One of the others may have lost the step in which that group asked, and be behind the third one.
    assert in_passing or whole
    assert all("one group alone has it" in r.getMessage() for r in whole)


@pytest.mark.parametrize(
    ("use_async_quorum", "make"),
    [
        pytest.param(True, Loop.make, id=""),
        pytest.param(False, Loop.make, id="synchronous", marks=pytest.mark.slow),
        pytest.param(True, _two, id="two", marks=pytest.mark.slow),
    ],
)
def test_the_source_fails(
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    use_async_quorum: bool,
    make: Callable[[nn.Module], Any],
) -> None:
    """The next quorum names another source. Parts that have arrived are kept."""

    def fails(rank: Rank, round: int) -> None:
        if rank.group < 2 and halfway(cluster, 2) and not crashed:
            assert rank.manager is not None
            plan = rank.manager._current.plan
            if plan is not None and plan.recover_dst:
                crashed.append(rank.group)
                rank.crash()

    def without_it(manager: Manager) -> bool:
        plan = manager._current.plan
        return bool(crashed) and plan is not None and len(plan.replica_ids) == 2

    crashed: list[int] = []
    settings = {"use_async_quorum": use_async_quorum}
    loop = Loop(together=2, make=make, begun=fails, counts=without_it, settings=settings)
    found = _run(cluster, loop, first=2, later=1)
    assert len(found) == 2 and len(crashed) == 1
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def test_the_ranks_of_a_group_count_the_same_groups(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a synchronous quorum, where one rank has a state that alone would be healed at once."""
    monkeypatch.setattr(modes, "LITTLE", 10_000)
    counted: dict[tuple[int, int, int], set[int]] = {}

    def reduced(rank: Rank, round: int) -> None:
        assert rank.manager is not None and rank.manager._current.plan is not None
        attempt = rank.group, rank.manager.current_step(), rank.manager._current.plan.quorum_id
        counted.setdefault(attempt, set()).add(rank.manager.num_participants())

    wide = {"model": lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))}
    settings = {**AUTO, "use_async_quorum": False}
    loop = TwoRanks(together=3, second=wide, settings=settings, initial=2, reduced=reduced)
    _run(cluster, loop, first=2, later=1, ranks=2)
    assert len(counted) > 10 and all(len(groups) == 1 for groups in counted.values())


def test_too_few_groups_are_left(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """They commit no step without the group that joins, which would wait for a gradient in vain."""

    def fails(rank: Rank, round: int) -> None:
        if rank.group == 1 and round == 8:
            crashed.append(round)
            rank.crash()

    def without_it(manager: Manager) -> bool:
        plan = manager._current.plan
        return plan is not None and [one.split(":")[0] for one in sorted(plan.replica_ids)] == [
            "group_0",
            "group_2",
        ]

    crashed: list[int] = []
    loop = Loop(together=2, begun=fails, counts=without_it, settings={"min_replica_size": 2})
    found = _run(cluster, loop, first=2, later=1)
    assert len(found) == 2 and len(crashed) == 1
    (logged,) = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert "without this group too few take part" in logged


@pytest.mark.slow
def test_the_others_replay_a_step_while_a_group_heals(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group fails in mid-step while parts arrive. The others lose no step; the newcomer adds zeros
    meanwhile.
    """

    def fails(rank: Rank) -> None:
        if rank.group == 1 and halfway(cluster, 3):
            crashed.append(rank.group)
            rank.crash()

    def without_it(manager: Manager) -> bool:
        plan = manager._current.plan
        return bool(crashed) and plan is not None and len(plan.replica_ids) == 3

    cluster.make_pg = lambda group: ProcessGroupGloo(timeout=OPERATION)
    monkeypatch.setattr(collectives, "_DRAIN_SEC", DRAIN_SEC)
    crashed: list[int] = []
    loop = Loop(together=3, quorum=fails, counts=without_it, settings={"replay_failed_step": True})
    with caplog.at_level(logging.INFO):
        found = _run(cluster, loop, first=3, later=1)
    assert len(found) == 3
    assert loop.joined[3] >= LEAST_ROUNDS
    assert all(committed for group in (0, 2) for _, committed, _ in loop.histories[group])
    assert [r for r in caplog.records if "reduced again with 2 groups" in r.getMessage()]
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def test_weights_of_no_step_are_not_trained_on(cluster: Cluster) -> None:
    """The only source fails when some parts are in place: the healing group ends, as after a failed
    transfer in place.
    """

    def fails(rank: Rank, round: int) -> None:
        if rank.group == 0 and halfway(cluster, 1):
            rank.crash()

    with pytest.raises(RuntimeError, match="a heal of this group did not get to its end"):
        _run(cluster, Loop(together=2, begun=fails), first=1, later=1)


class _Own(optim.Adam):
    pass


def _hooked(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda model: _Own(model.parameters()),
            "the optimizer is _Own: known to step each element by itself are SGD",
        ),
        (_hooked, "SGD has hooks of its steps"),
    ],
)
def test_what_does_not_qualify_is_healed_at_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, make: Any, reason: str
) -> None:
    loop = Loop(together=2, make=make)
    _run(cluster, loop, first=1, later=1)
    assert [r for r in caplog.records if "transferred at once" in r.getMessage() and reason in r.getMessage()]
    assert loop.joined[1] < LEAST_ROUNDS, "it waits for its connection only"


def test_a_job_with_local_steps_is_healed_at_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """As LocalSGD and DiLoCo register what they do."""

    def registers(rank: Rank, round: int) -> None:
        if round == 0:
            assert rank.manager is not None
            rank.manager.register_layout("test", ["as DiLoCo"])

    _run(cluster, Loop(together=2, begun=registers), first=1, later=1)
    logged = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert len(logged) == 1 and "on their own between two averages" in logged[0]


@pytest.mark.parametrize("mode", [HealMode.AT_ONCE, HealMode.IN_PASSING])
def test_auto_chooses_after_some_steps(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mode: HealMode
) -> None:
    monkeypatch.setattr(Figures, "mode", mode)
    monkeypatch.setattr(modes, "LITTLE", 0)
    with caplog.at_level(logging.INFO):
        _run(cluster, Loop(settings=AUTO), first=2, later=1)
    logged = [r.getMessage() for r in caplog.records]
    assert [text for text in logged if "training along from step" in text]
    whole = [text for text in logged if "transferred at once" in text]
    assert len(whole) == (mode is HealMode.AT_ONCE)
    assert all("s of all groups together, and the rest in parts would lose" in text for text in whole)


@pytest.mark.slow
def test_with_auto_one_rank_of_a_group_has_a_small_state(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It connects and heals at once, so the other one does, too. The other groups lose no step."""
    monkeypatch.setattr(modes, "LITTLE", 10_000)
    wide = {"model": lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))}
    loop = TwoRanks(second=wide, settings=AUTO, initial=2)
    with caplog.at_level(logging.INFO):
        _run(cluster, loop, first=2, later=1, ranks=2)
    logged = [r.getMessage() for r in caplog.records]
    assert [text for text in logged if "another rank of this group needs the whole state" in text]
    assert all(committed for group in (0, 1) for _, committed, _ in loop.histories[group])


def test_with_auto_a_group_whose_only_source_fails_trains_on_with_its_own_weights(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source fails as soon as the other group is in its quorum."""

    def fails(rank: Rank) -> None:
        assert rank.manager is not None
        plan = rank.manager._current.plan
        if rank.group == 0 and plan is not None and plan.replica_world_size == 2:
            rank.crash()

    monkeypatch.setattr(modes, "LITTLE", 0)
    loop = Loop(
        together=1, steps=1, quorum=fails, counts=lambda manager: manager._replica_id.startswith("group_1")
    )
    loop.settings = AUTO
    with caplog.at_level(logging.INFO):
        (ended,) = _run(cluster, loop, first=1, later=1)
    assert ended[0] == loop.steps + 1, "it began anew"
    logged = [r.getMessage() for r in caplog.records]
    assert not [text for text in logged if "training along from step" in text]


def test_frozen_weights_come_with_the_rest(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Those of the first layer, which no optimizer has."""

    def make(model: nn.Module) -> optim.Optimizer:
        frozen, *others = model.children()
        for parameter in frozen.parameters():
            parameter.requires_grad_(False)
        return optim.Adam([parameter for child in others for parameter in child.parameters()], lr=0.01)

    _run(cluster, Loop(together=2, make=make), first=1, later=1)
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


class Marked(nn.Linear):
    """Has a buffer that is changed in the middle of a step, and notes what is loaded into it."""

    def __init__(self) -> None:
        super().__init__(16, 32)
        self.register_buffer("mark", torch.zeros(1))
        self.loaded: list[float] = []

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.loaded.append(state_dict[f"{prefix}mark"].item())


def test_buffers_are_of_the_begin_of_the_step(cluster: Cluster) -> None:
    """A target fetches them in the middle of a step, when the source has changed them already."""
    made: list[Marked] = []

    def model() -> nn.Module:
        made.append(Marked())
        return nn.Sequential(made[-1], nn.ReLU(), nn.Linear(32, 1))

    loop = Loop(together=2, model=model, agreed=lambda model, step: model[0].mark.fill_(step))  # type: ignore
    _run(cluster, loop, first=1, later=1, same=False)
    first, *_ = loop.histories[1][loop.joined[1]]
    (loaded,) = [value for one in made for value in one.loaded]
    assert loaded == first - 1


def _adds_a_parameter(optimizer: optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def _reorders(optimizer: optim.Optimizer) -> None:
    """Swaps weight and bias of the BatchNorm, which have the same shape."""
    parameters = optimizer.param_groups[0]["params"]
    parameters[2], parameters[3] = parameters[3], parameters[2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # It depends on which group is the first.
        (
            _adds_a_parameter,
            "parameters or optimizers differ from the source's|the parameter groups of an optimizer",
        ),
        # Or a digest differs, if the source is the first group to reorder its parameters.
        (_reorders, "the parameter groups of an optimizer were changed|differ from the source's"),
    ],
)
def test_an_optimizer_whose_groups_change_meanwhile(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, change: Callable[[optim.Optimizer], None], reason: str
) -> None:
    """Each replica group changes its optimizer between two of its steps: the state is transferred at once."""

    def changes(rank: Rank, round: int) -> None:
        if halfway(cluster, 1) or changed:
            assert rank.manager is not None
            if rank.group not in changed:
                changed.add(rank.group)
                (optimizer,) = rank.manager._replicas.state.optimizers
                change(optimizer)

    changed: set[int] = set()
    _run(cluster, Loop(together=2, begun=changes), first=1, later=1)
    assert changed == {0, 1}
    logged = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert len(logged) == 1 and re.search(reason, logged[0])


@pytest.mark.slow
def test_parameters_that_are_frozen_and_unfrozen_meanwhile(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """In all groups in the same steps. Some parameters get their first gradient and optimizer state during
    the heal.
    """

    def freezes(model: nn.Module, step: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.requires_grad_((step + number) % 4 < 2 and (number != 1 or step > 15))
            parameter.grad = None

    loop = Loop(together=2, agreed=freezes)
    _run(cluster, loop, first=1, later=1)
    assert loop.joined[1] >= LEAST_ROUNDS
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.second.weight = self.first.weight

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.second(self.first(data).tanh()).tanh())
        return found


def test_tied_weights(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(together=2, model=_Tied)
    _run(cluster, loop, first=1, later=1)
    assert loop.joined[1] >= 6, "its state came in parts over some steps"
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


def test_another_transport_has_no_parts(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    class WholeOnly(HTTPTransport[Any]):
        gives_parts = False

    class Each(Loop):
        def __call__(self, rank: Rank) -> Any:
            self.settings = {"checkpoint_transport": WholeOnly(DEADLINE, 0)}
            return super().__call__(rank)

    _run(cluster, Each(together=2), first=1, later=1)
    logged = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert len(logged) == 1 and "the checkpoint transport gives a state at once only" in logged[0]


@pytest.mark.parametrize("use_async_quorum", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("in_passing", [0, 1])
def test_one_group_has_it_and_the_other_has_not(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, in_passing: int, use_async_quorum: bool
) -> None:
    class Mixed(Loop):
        def __call__(self, rank: Rank) -> Any:
            settings = {"heal_along": rank.group == in_passing, "use_async_quorum": use_async_quorum}
            own = Loop(**{**self.__dict__, "settings": settings})
            return own(rank)

    _run(cluster, Mixed(together=2), first=1, later=1)
    logged = [r for r in caplog.records if "transferred at once" in r.getMessage()]
    assert len(logged) == in_passing, "only a target tries it"


def test_a_difference_is_found_and_healed_at_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped: list[int] = []
    write = joining.Parameters.write

    def flip(self: Any, begin: int, end: int, states: Any, memory: torch.Tensor) -> None:
        if not flipped and begin == 64:
            flipped.append(begin)
            memory[17] ^= 1
        write(self, begin, end, states, memory)

    monkeypatch.setattr(joining.Parameters, "write", flip)
    _run(cluster, Loop(together=2), first=1, later=1)
    logged = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert len(logged) == 1
    assert "the weights or the optimizer state differ from the source's in step" in logged[0]
    assert "in the elements 0 to 128 of all parameters" in logged[0]


@pytest.mark.slow
def test_a_learning_rate_that_is_set_within_a_step(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The target applies a gradient with the learning rate that the source has when it votes."""
    changed: list[int] = []

    def reduced(rank: Rank, round: int) -> None:
        assert rank.manager is not None
        (optimizer,) = rank.manager._replicas.state.optimizers
        if rank.group == 0 and len(changed) < 4 and halfway(cluster, 1):
            changed.append(round)
            optimizer.param_groups[0]["lr"] *= 1.5

    _run(cluster, Loop(together=2, reduced=reduced), first=1, later=1)
    assert len(changed) == 4
    assert not [r for r in caplog.records if "transferred at once" in r.getMessage()]


class Scaled(nn.Module):
    """Stands for a model with a GradScaler: its gradients are multiplied by a scale, which is part of the
    state.
    """

    scale: torch.Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.net(data) * self.scale.sqrt()  # the loss is the square


def test_a_gradient_scaler_of_another_scale_is_a_difference(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups reduce gradients of the source's scale. That comes with the state: the target still divides
    those of the step in which it loads it by its own.
    """
    scales = iter([4.0, 16.0])
    models: dict[int, Scaled] = {}

    def model() -> Scaled:
        return models.setdefault(len(models), Scaled(next(scales)))

    def reduced(rank: Rank, round: int) -> None:
        for parameter in models[rank.group].parameters():
            assert parameter.grad is not None
            # So short that they are not clipped: clipped gradients of both scales would be equal.
            parameter.grad.div_(1024 * models[rank.group].scale)

    _run(cluster, Loop(together=2, model=model, reduced=reduced), first=1, later=1, same=False)
    (logged,) = [r.getMessage() for r in caplog.records if "transferred at once" in r.getMessage()]
    assert "the weights or the optimizer state differ from the source's" in logged
    assert models[1].scale == 4
