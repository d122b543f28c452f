"""After any failures, the final weights contain each sample exactly once per epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable, Optional

import pytest

from tests.bounded import often, todays
from tests.unit.data.history import (
    Batch,
    Broken,
    Group,
    Job,
    MixedCheckpoints,
    Quorum,
    Replays,
    RestlessStart,
    State,
    check,
    one_process,
    prove,
)
from torchft.data import position
from torchft.data.agreement import GroupAction, Verdict
from torchft.data.kept import KeptUnits
from torchft.data.position import DataPlan, DataPosition, RankShare

EVENTS = {
    "a collective failed",
    "a heal failed",
    "a spare",
    "a step was not committed",
    "a stranger asked",
    "a unit was left out",
    "all failed",
    "at the newest step, at another position",
    "committed and failed before any heal from it",
    "failed between steps",
    "failed in a step",
    "healed",
    "healed at the end",
    "joined",
    "missed a quorum",
    "restored",
    "restored from different checkpoints",
    "started again after its end",
    "a reduction lacks the groups that failed",
}


# Of groups that keep the gradients of steps that are not committed
OF_REPLAYS = {
    "came again after several failures",
    "came again without kept units",
    "groups kept the same unit",
}


def test_random_histories() -> None:
    seen: Counter[str] = Counter()
    for seed in range(often(1500)):
        seen += prove(seed).seen
    assert set(seen) == EVENTS


def test_random_histories_of_groups_that_replay() -> None:
    seen: Counter[str] = Counter()
    for seed in range(often(10_000)):
        seen += prove(seed, job=Replays).seen
    assert set(seen) == EVENTS | OF_REPLAYS


@pytest.mark.parametrize("job", [RestlessStart, MixedCheckpoints])
def test_more_faults_of_one_kind(job: type[Job]) -> None:
    for seed in range(often(500)):
        prove(seed, job=job)


@pytest.mark.slow  # two minutes; test_random_histories has 300, or 1500 if SEED is set
@pytest.mark.parametrize("job", [Job, Replays])
@pytest.mark.parametrize("part", range(10))
def test_a_hundred_thousand_histories(part: int, job: type[Job]) -> None:
    first = todays(10_000 * part)
    for seed in range(first, first + 10_000):
        prove(seed, job=job)


# Mistakes of a loader


class DoesNotAdvance(Group):
    def commit(self, batch: Batch) -> None:
        before = self.position
        super().commit(batch)
        self.position = before


class AdvancesWithoutCommit(Group):
    def abandon(self) -> None:
        if self.position != self.plan.end:
            self.position = self.plan.advance(self.position)


class HealsWeightsOnly(Group):
    def load(self, state: State) -> None:
        before = getattr(self, "position", DataPosition())
        super().load(state)
        self.position = before


class SavesBeforeTheOptimizerSteps(Group):
    """A mistake: a checkpoint has the position after a step, and the weights before it."""

    def checkpoint(self, batch: Batch) -> State:
        return replace(self.save(), weights=self.weights[:-1])


class SavesThePositionOfTheStep(Group):
    """A mistake: a checkpoint has the position before a step, and the weights after it."""

    def checkpoint(self, batch: Batch) -> State:
        state = self.save()
        batches = self.plan.batches_per_epoch
        epoch, batch_number = divmod(state.data["epoch"] * batches + state.data["batch"] - 1, batches)
        return replace(state, data={**state.data, "epoch": epoch, "batch": batch_number})


class Uncounted(Group):
    """A mistake: ignores the number of samples in the reduction."""

    def check(self, shares: list[RankShare], counted: list[int]) -> bool:
        return True


class CutsOverTheQuorum(Group):
    """A mistake: divides batches among all groups of the quorum, including healing ones, for which the
    Manager sends zeros.

    The check of the sample count refuses each such step. So the weights are correct, but the job makes no
    progress while a group heals.
    """

    def shares(self, quorum: Quorum) -> list[RankShare]:
        return super().shares(replace(quorum, participants=[group.name for group in quorum.groups]))


class CutsOverTheQuorumUncounted(CutsOverTheQuorum, Uncounted):
    pass


class IsInTheReductionTwice(Uncounted):
    """A mistake: a healing group computes the units of the first participant, and its gradients count."""

    def shares(self, quorum: Quorum) -> list[RankShare]:
        if self.name in quorum.participants:
            return super().shares(quorum)
        return super().shares(replace(quorum, participants=[self.name, *quorum.participants[1:]]))

    @classmethod
    def contributing(cls, quorum: Quorum) -> list[str]:
        return [group.name for group in quorum.groups]


class ComparesNoPositions(Group):
    """A mistake: groups at the newest step train, even if their positions in the data differ."""

    def judge(self, sums: list[int], quorum: Quorum, heals: bool) -> Verdict:
        return Verdict.ALIKE


class NeverGivesWay(Group):
    """A mistake: groups at different positions never heal, and lose all their steps."""

    def judge(self, sums: list[int], quorum: Quorum, heals: bool) -> Verdict:
        verdict = super().judge(sums, quorum, heals)
        return Verdict.DIFFERS if verdict is Verdict.GIVES_WAY else verdict


class GivesWayAlsoIfItLeads(Group):
    def judge(self, sums: list[int], quorum: Quorum, heals: bool) -> Verdict:
        verdict = super().judge(sums, quorum, heals)
        return Verdict.GIVES_WAY if verdict is Verdict.DIFFERS else verdict


class LeavesWithoutComparing(Group):
    """A mistake: a group at the end of the data ignores a comparison that fails."""

    def judge(self, sums: list[int], quorum: Quorum, heals: bool) -> Verdict:
        return Verdict.ALIKE if self.position == self.plan.end else super().judge(sums, quorum, heals)


class EndsByItself(LeavesWithoutComparing):
    """A mistake: a group ends without regard to healing groups."""

    def action(self, heals_in_background: bool, all_up_to_date: bool) -> GroupAction:
        return super().action(False, True)


class GivesWayToMissingEntries(Group):
    """A mistake: groups announce step -1 if entries are missing in the first step. If only such groups meet
    in the next quorum, init_sync heals none of them, and they train on different weights.
    """

    def judge(self, sums: list[int], quorum: Quorum, heals: bool) -> Verdict:
        verdict = super().judge(sums, quorum, heals)
        leads = self.name == quorum.up_to_date[0]
        return Verdict.GIVES_WAY if verdict is Verdict.INCOMPLETE and not leads and not heals else verdict


class CountsUnitsTwice(Uncounted):
    """A mistake: two groups keep the same unit, and both count."""

    def counting(self, quorum: Quorum) -> list[frozenset[int]]:
        return [super(CountsUnitsTwice, self).counting(replace(quorum, texts=[t]))[0] for t in quorum.texts]


class CountsOtherBatches(Group):
    """A mistake: a group behind the others, which heals, is taken to keep units of their batch."""

    def counting(self, quorum: Quorum) -> list[frozenset[int]]:
        kept = map(KeptUnits.parse, quorum.texts)
        return [frozenset() if one is None else one.units for one in kept]


class LosesWhatItKeeps(Group):
    def keep(self, quorum: Quorum, shares: list[RankShare]) -> None:
        super().keep(quorum, shares)
        self.kept_shares = []


class ComputesWhatIsKept(Uncounted):
    """A mistake: the whole batch is divided again, and the kept gradients are added nevertheless."""

    def shares(self, quorum: Quorum) -> list[RankShare]:
        return super().shares(replace(quorum, texts=[""] * len(quorum.texts)))


class KeepsOnlyTheLastAttempt(Group):
    def keep(self, quorum: Quorum, shares: list[RankShare]) -> None:
        before = self.kept
        self.kept = None
        super().keep(quorum, shares)
        self.kept = self.kept or before


class CutsByTheSpeedsOfAnotherQuorum(Uncounted):
    """A mistake: a group that joins does not know the speeds of the others."""

    def speeds(self, quorum: Quorum) -> tuple[int, ...]:
        joined = self.name == quorum.groups[-1].name
        return super().speeds(replace(quorum, speeds={} if joined else quorum.speeds))


LOADER_MISTAKES = [
    DoesNotAdvance,
    AdvancesWithoutCommit,
    HealsWeightsOnly,
    SavesBeforeTheOptimizerSteps,
    SavesThePositionOfTheStep,
    Uncounted,
    CutsOverTheQuorum,
    CutsOverTheQuorumUncounted,
    IsInTheReductionTwice,
    ComparesNoPositions,
    NeverGivesWay,
    GivesWayAlsoIfItLeads,
    GivesWayToMissingEntries,
    LeavesWithoutComparing,
    EndsByItself,
    CountsUnitsTwice,
    CountsOtherBatches,
    LosesWhatItKeeps,
    ComputesWhatIsKept,
    KeepsOnlyTheLastAttempt,
    CutsByTheSpeedsOfAnotherQuorum,
]
# Mistakes that are rarely visible in other jobs
SHOWN_BY: dict[type[Group], type[Job]] = {
    GivesWayAlsoIfItLeads: MixedCheckpoints,
    NeverGivesWay: MixedCheckpoints,
    GivesWayToMissingEntries: RestlessStart,
    CountsUnitsTwice: Replays,
    CountsOtherBatches: Replays,
    LosesWhatItKeeps: Replays,
    ComputesWhatIsKept: Replays,
    KeepsOnlyTheLastAttempt: Replays,
}


@pytest.mark.parametrize("mistake", LOADER_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_of_a_loader_is_found(mistake: type[Group]) -> None:
    assert is_found(mistake, SHOWN_BY.get(mistake, Job))


# Mistakes of the plan


def ends_late(units: Sequence[int], rank: int, of: int, speeds: tuple[int, ...]) -> Sequence[int]:
    return units[len(units) * rank // of : len(units) * (rank + 1) // of + 1]


def drops_the_rest(units: Sequence[int], rank: int, of: int, speeds: tuple[int, ...]) -> Sequence[int]:
    size = len(units) // of
    return units[size * rank : size * (rank + 1)]


def weighs_copies(share: Callable[..., RankShare]) -> Callable[..., RankShare]:
    """A mistake: units that are added to give all ranks the same number count like others."""

    def mistaken(plan: DataPlan, position: DataPosition, *args: Any) -> RankShare:
        got = share(plan, position, *args)
        size = plan.batch_size(position)
        return replace(got, units=tuple(replace(u, weight=len(u.indices) / size) for u in got.units))

    return mistaken


def adds_no_copies(share: Callable[..., RankShare]) -> Callable[..., RankShare]:
    def mistaken(plan: DataPlan, position: DataPosition, *args: Any) -> RankShare:
        got = share(plan, position, *args)
        return replace(got, units=tuple(u for u in got.units if u.weight))

    return mistaken


def weighs_by_the_global_batch_size(share: Callable[..., RankShare]) -> Callable[..., RankShare]:
    def mistaken(plan: DataPlan, position: DataPosition, *args: Any) -> RankShare:
        got = share(plan, position, *args)
        factor = plan.batch_size(position) / plan.global_batch_size
        return replace(got, units=tuple(replace(u, weight=u.weight * factor) for u in got.units))

    return mistaken


def cuts_other_units_for_each_number_of_groups(share: Callable[..., RankShare]) -> Callable[..., RankShare]:
    """A mistake, as with a sampler with batches per group: the samples of a step depend on the number of
    groups.
    """

    def mistaken(
        plan: DataPlan, position: DataPosition, rank: Optional[int], participants: int, *args: Any
    ) -> RankShare:
        got = share(plan, position, rank, participants, *args)
        move = participants - 1
        moved = [replace(u, indices=[(index + move) % plan.length for index in u.indices]) for u in got.units]
        return replace(got, units=tuple(moved))

    return mistaken


PLAN_MISTAKES: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "parts overlap": (position, "_part", lambda _: ends_late),
    "the rest of a cut is dropped": (position, "_part", lambda _: drops_the_rest),
    "the last batch of an epoch is dropped": (
        DataPlan,
        "batches_per_epoch",
        lambda _: property(lambda plan: max(1, plan.length // plan.global_batch_size)),
    ),
    "copies count": (DataPlan, "share", weighs_copies),
    "no copies": (DataPlan, "share", adds_no_copies),
    "a smaller batch weighs less": (DataPlan, "share", weighs_by_the_global_batch_size),
    "batches depend on the groups": (DataPlan, "share", cuts_other_units_for_each_number_of_groups),
    "an order that repeats itself": (position, "_order", lambda _: lambda length, seed, epoch: [0] * length),
    "each epoch begins twice": (
        DataPlan,
        "load",
        lambda load: lambda plan, state: load(plan, state if state["batch"] != 1 else {**state, "batch": 0}),
    ),
}


@pytest.mark.parametrize("name", PLAN_MISTAKES)
def test_a_mistake_of_the_plan_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, mistake = PLAN_MISTAKES[name]
    one_process.cache_clear()
    monkeypatch.setattr(owner, attribute, mistake(vars(owner)[attribute]))
    try:
        assert is_found()
    finally:
        one_process.cache_clear()


def is_found(mistake: type[Group] = Group, job: type[Job] = Job) -> bool:
    for seed in range(1000):
        try:
            prove(seed, mistake, job)
        except Broken:
            return True
    return False


# The oracle itself


def test_the_oracle_accepts_one_process() -> None:
    plan = DataPlan(length=7, global_batch_size=4, micro_batch_size=2, shuffle=False, epochs=2)
    first = ((0, 0.25), (1, 0.25), (2, 0.25), (3, 0.25))
    rest = tuple((index, round(1 / 3, 9)) for index in (4, 5, 6))
    assert one_process(plan) == (first, rest) * 2
    check(plan, (first, rest) * 2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[0, 1], [2]], "2 steps, of 4"),
        ([[0, 1], [2], [0, 1], [1]], r"epoch 1 trained on \[0, 1, 1\], of range\(3\)"),
        ([[0, 1], [0, 1], [2], [2]], "epoch 0 trained on"),
        ([[0], [1, 2], [0, 1], [2]], "a batch of 1"),
        ([[0, 2], [1], [0, 1], [2]], "one process trains on other batches"),
    ],
)
def test_the_oracle_refuses(weights: list[list[int]], message: str) -> None:
    plan = DataPlan(length=3, global_batch_size=2, micro_batch_size=1, shuffle=False, epochs=2)
    with pytest.raises(Broken, match=message):
        check(plan, tuple(tuple((index, 1 / len(batch)) for index in batch) for batch in weights))


def test_the_oracle_requires_the_mean() -> None:
    plan = DataPlan(length=3, global_batch_size=2, micro_batch_size=1, shuffle=False)
    with pytest.raises(Broken, match="the weights of a batch are not those of a mean"):
        check(plan, (((0, 0.5), (1, 0.25)), ((2, 1.0),)))
