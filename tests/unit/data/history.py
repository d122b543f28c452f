"""A simulated job: groups that fail, join, heal, and restore from checkpoints, with the real plan of their
data.

It is adversarial: any set of groups may form a quorum, a failed collective may succeed in some groups, and
any checkpoint may be restored. The simulated weights of a group are a list with one :class:`Batch` for each
committed step. :func:`check` is the oracle: it does not use units and positions, but only compares these
batches with those of one process.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Optional

from torchft.data.agreement import GroupAction, Verdict, entry, judge, next_action, step_to_announce
from torchft.data.kept import KeptUnits, counting
from torchft.data.position import DataPlan, DataPosition, RankShare, SamplesDiffer

# The samples of one step: the index of each, and its weight in the sum. Weights are sums of quotients, so
# they are rounded.
Batch = tuple[tuple[int, float], ...]
Weights = tuple[Batch, ...]

MOST_WITH_FAULTS = 40  # no fault occurs after this number of quorums, so that the job ends
MOST_QUORUMS = 200


class Broken(AssertionError):
    """A violation of the guarantee."""


@dataclass(frozen=True)
class State:
    """The state in a heal or a checkpoint."""

    step: int
    weights: Weights
    origin: str
    data: dict[str, int]


class Group:
    """A replica group, with the decisions of its loader. Subclasses make mistakes."""

    def __init__(self, name: str, plan: DataPlan, state: Optional[State] = None) -> None:
        self.name = name
        self.plan = plan
        self.step = 0
        self.weights: Weights = ()
        # until the first commit: the name of the group that began with these weights, if init_sync is set;
        # without init_sync all groups begin with equal weights
        self.origin = ""
        self.position = DataPosition()
        self.keeps = False  # replay_failed_step
        self.forget()
        if state is not None:
            self.load(state)

    def save(self) -> State:
        return State(self.step, self.weights, self.origin, self.plan.save(self.position))

    def load(self, state: State) -> None:
        self.step, self.weights, self.origin = state.step, state.weights, state.origin
        self.position = self.plan.load(state.data)
        self.forget()

    # Gradients of a step that was not committed

    def forget(self) -> None:
        self.kept: Optional[KeptUnits] = None
        self.kept_shares: list[RankShare] = []  # what the kept gradients are the sum of
        self.kept_of: set[tuple[str, Weights]] = set()  # the weights of which they are gradients

    def counting(self, quorum: Quorum) -> list[frozenset[int]]:
        return counting(quorum.texts, step=quorum.newest, committed_quorum_id=0, position=self.position)

    def begin(self, quorum: Quorum) -> None:
        """Forgets what the quorum cannot use."""
        own = self.counting(quorum)[quorum.groups.index(self)]
        if self.kept is not None and own != self.kept.units:
            self.forget()
        elif self.kept is None and own:
            raise Broken("other groups count on gradients that are not kept")

    def keep(self, quorum: Quorum, shares: list[RankShare]) -> None:
        """Keeps the gradients of its units, with those of earlier attempts."""
        units = {unit.number for share in shares for unit in share.units if unit.weight}
        units |= self.kept.units if self.kept is not None else set()
        if not units:
            return
        self.kept = KeptUnits(self.step, 0, self.position, frozenset(units))
        self.kept_shares += shares
        self.kept_of.add((self.origin, self.weights))

    def action(self, heals_in_background: bool, all_up_to_date: bool) -> GroupAction:
        return next_action(
            at_end=self.position == self.plan.end,
            heals_in_background=heals_in_background,
            all_up_to_date=all_up_to_date,
        )

    @property
    def digest(self) -> str:
        return self.plan.digest(self.position)

    def judge(self, sums: list[int], quorum: Quorum, heals: bool) -> Verdict:
        leads = self.name == quorum.up_to_date[0]
        return judge(sums, self.digest, participants=len(quorum.participants), leads=leads, heals=heals)

    def shares(self, quorum: Quorum) -> list[RankShare]:
        """The shares of each data rank; without samples if this group is at the end, or is no participant."""
        rank = quorum.participants.index(self.name) if self.name in quorum.participants else None
        position = DataPosition() if self.position == self.plan.end else self.position
        kept = frozenset[int]().union(*self.counting(quorum))
        own = self.kept.units if self.kept is not None else ()
        groups, ranks = len(quorum.participants), quorum.data_world_size
        speeds = self.speeds(quorum)
        return [self.plan.share(position, rank, groups, r, ranks, kept, own, speeds) for r in range(ranks)]

    def speeds(self, quorum: Quorum) -> tuple[int, ...]:
        """The speeds of the participants."""
        return tuple(quorum.speeds.get(name, 100) for name in quorum.participants)

    def check(self, shares: list[RankShare], counted: list[int]) -> bool:
        """Whether the reductions of all data ranks contain the expected samples."""
        try:
            for share, samples in zip(shares, counted):
                share.check(samples)
        except SamplesDiffer:
            return False
        return True

    def commit(self, batch: Batch) -> None:
        self.position = self.plan.advance(self.position)
        self.weights += (batch,)
        self.origin = ""
        self.step += 1
        self.forget()

    def abandon(self) -> None:
        """Called when the step was not committed."""

    def checkpoint(self, batch: Batch) -> State:
        """Returns a checkpoint, taken after the optimizer has stepped with a batch."""
        return self.save()

    @classmethod
    def contributing(cls, quorum: Quorum) -> list[str]:
        """The groups whose gradients the Manager does not replace by zeros, if they have the weights of the
        step.
        """
        return quorum.participants


@dataclass
class Quorum:
    groups: list[Group]
    newest: int  # the newest step
    texts: list[str]  # what each group announces of the gradients that it keeps
    up_to_date: list[str]
    data_world_size: int
    participants: list[str] = field(default_factory=list)  # their gradients count
    speeds: dict[str, int] = field(default_factory=dict)  # of the groups; missing: 100


class Job:
    """One random history, which the seed determines.

    Attributes:
        likelier: factors for the frequency of some events.
    """

    likelier: dict[str, float] = {}  # noqa: RUF012 (a constant)

    def __init__(self, seed: int, group: type[Group] = Group) -> None:
        self.random = random.Random(seed)
        self.group = group
        self.plan = DataPlan(
            length=self.random.randint(1, 14),
            global_batch_size=self.random.choice([1, 2, 3, 4, 6, 8, 12]),
            micro_batch_size=1,
            shuffle=self.random.random() < 0.7,
            seed=self.random.randrange(3),
            epochs=self.random.randint(1, 2),
        )
        self.use_async_quorum = self.random.random() < 0.5
        self.init_sync = self.random.random() < 0.5
        self.keeps = False  # replay_failed_step
        self.keeps_step = self.random.random() < 0.8  # whether a checkpoint contains the Manager's step, too
        self.faults_end = self.random.randint(0, MOST_WITH_FAULTS)
        self.faulty = True
        self.named = 0
        self.groups: list[Group] = []
        self.checkpoints: list[State] = []
        self.finished: list[Group] = []
        self.drift = random.Random(f"speeds {seed}")  # of its own: it changes nothing else of a history
        self.speeds: dict[str, int] = {}  # of the last quorum
        # groups and speeds of the last quorum, if all groups committed its step
        self.compared: tuple[list[str], dict[str, int]] = ([], {})
        self.seen: Counter[str] = Counter()  # counts the events

    def run(self) -> list[Weights]:
        """Returns the weights of all groups that reached the end, which is at least one."""
        self._restore()
        for number in range(MOST_QUORUMS):
            self.faulty = number < self.faults_end
            self._between_steps()
            if not self.groups and self._happens(0.4, "started again after its end"):
                self._restore()
            if not self.groups:
                return [group.weights for group in self.finished]
            self._step([g for g in self.groups if not self._happens(0.1, "missed a quorum")] or self.groups)
        raise Broken(f"the job has not ended after {MOST_QUORUMS} quorums")

    # Failures and joins

    def _happens(self, probability: float, what: str = "") -> bool:
        happens = self.faulty and self.random.random() < probability * self.likelier.get(what, 1)
        if happens and what:
            self.seen[what] += 1
        return happens

    def _join(self, state: Optional[State]) -> None:
        self.named += 1
        group = self.group(f"g{self.named:03}", self.plan, state)
        group.keeps = self.keeps and self.most_participants > 2 and self.random.random() < 0.9
        if state is None and self.init_sync:
            group.origin = group.name
        self.groups.append(group)

    def _restore(self) -> None:
        """Starts the job with a random number of groups, from the newest checkpoint; as a fault, groups start
        from different checkpoints.
        """
        size = self.plan.global_batch_size
        micro = self.random.choice([micro for micro in range(1, size + 1) if size % micro == 0])
        self.plan = replace(self.plan, micro_batch_size=micro)
        self.data_world_size = self.random.choice([1, 1, 2, 3])
        self.most_participants = self.random.choice([99, 99, 1, 2])  # FIXED_WITH_SPARES
        for _ in range(self.random.randint(1, 5)):
            state = max(self.checkpoints, key=lambda state: len(state.weights), default=None)
            if state is not None and self._happens(0.2, "restored from different checkpoints"):
                state = self.random.choice([None, *self.checkpoints])
            if state is not None:
                self.seen["restored"] += 1
            if state is not None and not self.keeps_step:
                state = replace(state, step=0)
            self._join(state)

    def _between_steps(self) -> None:
        for group in list(self.groups):
            if self._happens(0.07, "failed between steps"):
                self.groups.remove(group)
        if self._happens(0.15, "joined"):
            self._join(None)
        if self._happens(0.03, "all failed"):
            self.groups.clear()
        if not self.groups and not self.finished:
            self._restore()

    # A step

    def _step(self, groups: list[Group]) -> None:
        if self._happens(0.03, "a stranger asked"):
            # Groups announce their settings: the stranger gets an error, and the other groups lose the step.
            if self._stranger().plan.digest(DataPosition()) == self.plan.digest(DataPosition()):
                raise Broken("a stranger was not refused")
            self.compared = ([], {})
            return
        newest = max(group.step for group in groups)
        quorum = Quorum(
            groups,
            newest,
            ["" if group.kept is None else group.kept.text for group in groups],
            [group.name for group in groups if group.step == newest],
            self.data_world_size,
            speeds=self._speeds(groups),
        )
        # The other groups heal from the first group before the step.
        from_first = newest == 0 and self.init_sync
        trains = [group for group in groups if group.name in quorum.up_to_date[: 1 if from_first else None]]
        behind = [group for group in groups if group not in trains]
        states = {
            group.name: self.random.choice(trains).save()
            for group in behind
            if not self._happens(0.2, "a heal failed")
        }
        self.seen["healed"] += len(states)
        in_background = self.use_async_quorum and not from_first
        if not in_background:
            self._heal(quorum, states)
        contributes = trains if in_background else groups
        quorum.participants = [group.name for group in contributes][: self.most_participants]
        self.seen["a spare"] += len(contributes) > len(quorum.participants)
        up_to_date = len(quorum.up_to_date) == len(groups)
        actions = {
            group.name: group.action(in_background and group in behind, up_to_date) for group in groups
        }
        healed = {group.name for group in trains} | (set() if in_background else set(states))
        if (
            GroupAction.PASSES in actions.values()
        ):  # a group at the end of the data aborts the collectives of the healing groups
            self._heal(quorum, states)
            self.seen["healed at the end"] += len(states)
            self.compared = ([], {})
            return
        for group in groups:
            group.begin(quorum)
        self._reduce_and_decide(quorum, actions, healed, states if in_background else {})

    def _speeds(self, groups: list[Group]) -> dict[str, int]:
        """As the lighthouse decides them: they stay for a while, and then they are others."""
        if self.drift.random() < 0.2:
            self.speeds = {group.name: self.drift.choice([25, 50, 100, 100, 400]) for group in groups}
        return {group.name: self.speeds.get(group.name, 100) for group in groups}

    def _stranger(self) -> Group:
        """A group with the settings of another job. Its name is the last in order."""
        strangers = [
            replace(self.plan, length=self.plan.length + 1),
            replace(self.plan, global_batch_size=self.plan.global_batch_size + self.plan.micro_batch_size),
            replace(self.plan, shuffle=not self.plan.shuffle),
            replace(self.plan, seed=self.plan.seed + 1),
            replace(self.plan, epochs=self.plan.epochs + 1),
        ]
        return self.group("stranger", self.random.choice(strangers))

    def _heal(self, quorum: Quorum, states: dict[str, State]) -> None:
        for group in quorum.groups:
            if group.name in states:
                group.load(states[group.name])

    def _finish(self, groups: list[Group]) -> None:
        self.finished += groups
        self.groups = [group for group in self.groups if group not in groups]

    def _reduce_and_decide(
        self, quorum: Quorum, actions: dict[str, GroupAction], healed: set[str], states: dict[str, State]
    ) -> None:
        names = [group.name for group in quorum.groups]
        compares, self.compared = (names, quorum.speeds) != self.compared, ([], {})
        shares = {group.name: group.shares(quorum) for group in quorum.groups}
        for name, of_ranks in shares.items():
            if len({len(share.units) for share in of_ranks}) != 1:
                raise Broken(
                    f"the ranks of {name} have different numbers of units: their collectives would hang"
                )
        # The Manager sends zeros for a group whose heal has not arrived.
        counts = [name for name in self.group.contributing(quorum) if name in healed]
        failed = [group for group in quorum.groups if self._happens(0.05, "failed in a step")]
        if failed and compares and self._happens(0.3, "a reduction lacks the groups that failed"):
            counts = [name for name in counts if name not in {group.name for group in failed}]
        # The group that leaves a unit out, in a step with a comparison. In any other step the group itself
        # reports this before it reduces, and ends the collectives.
        lacking = ""
        if compares and counts and self._happens(0.05, "a unit was left out"):
            lacking = self.random.choice(counts)
            shares[lacking] = [_without_first(share) for share in shares[lacking]]
        digests = {group.name: group.digest for group in quorum.groups}
        entries = [
            [
                entry(shares[name][rank].samples if actions[name] is GroupAction.TRAINS else 0, digests[name])
                for name in counts
            ]
            for rank in range(self.data_world_size)
        ]
        sums = [[sum(column) for column in zip(*of_rank)] or [0, 0, 0] for of_rank in entries]
        adding = [
            group
            for group in quorum.groups
            if group.name in counts and actions[group.name] is GroupAction.TRAINS
        ]
        batch = _sum([share for group in adding for share in (*group.kept_shares, *shares[group.name])])
        made_of = {(group.origin, group.weights) for group in adding}.union(*(g.kept_of for g in adding))
        self.seen["came again without kept units"] += any(group.kept_of for group in adding)
        self.seen["came again after several failures"] += any(
            len(group.kept_shares) > self.data_world_size for group in adding
        )
        self.seen["groups kept the same unit"] += _overlap(quorum)
        fails = bool(failed) or self._happens(0.1, "a collective failed")
        # groups at the end of the data compare, and then end the collectives of the others
        mixed = len(set(actions.values())) > 1
        self.groups = [group for group in self.groups if group not in failed]
        committed, left = [], []
        for group in quorum.groups:
            heals = group.name in states
            if heals:
                # Including the position, from which the expected samples follow.
                group.load(states[group.name])
            has_weights = group.name in healed or heals
            sees_failure = fails and self.random.random() < 0.6
            verdict = Verdict.ALIKE
            if compares and not sees_failure and has_weights:
                verdict = group.judge(sums[0], quorum, heals)
                if verdict is not Verdict.ALIKE:
                    self.seen["at the newest step, at another position"] += 1
            fine = has_weights and not sees_failure and verdict is Verdict.ALIKE and group.name != lacking
            if actions[group.name] is GroupAction.ENDS:
                if fine:
                    left.append(group)
                    continue
            elif (
                fine
                and not mixed
                and (not compares or group.check(group.shares(quorum), [s[0] for s in sums]))
            ):
                self.seen["committed and failed before any heal from it"] += group in failed
                if made_of - {(group.origin, group.weights)}:
                    raise Broken("gradients of other weights were added")
                group.commit(batch)
                committed.append(group)
                if self.random.random() < 0.15:
                    self.checkpoints.append(group.checkpoint(batch))
                continue
            self.seen["a step was not committed"] += 1
            group.abandon()
            may_keep = group.keeps and group in adding and group.step > 0 and not self._happens(0.1)
            if may_keep and verdict is Verdict.ALIKE and group.name != lacking and not mixed:
                group.keep(quorum, shares[group.name])
            else:
                group.forget()
            group.step = step_to_announce(group.step, verdict)
        if left and any(actions[name] is GroupAction.TRAINS for name in counts):
            raise Broken("some groups left in a quorum in which others train on")
        self._finish(left)
        if len(committed) == len(names):
            self.compared = names, quorum.speeds


def _overlap(quorum: Quorum) -> bool:
    found = [kept for kept in map(KeptUnits.parse, quorum.texts) if kept is not None]
    at_one = [kept.units for kept in found if kept[:3] == found[0][:3]]
    return sum(map(len, at_one)) > len(frozenset[int]().union(*at_one))


def _without_first(share: RankShare) -> RankShare:
    first, *others = share.units
    return replace(
        share, units=tuple(others), samples=share.samples - (len(first.indices) if first.weight else 0)
    )


def _sum(shares: list[RankShare]) -> Batch:
    weights: dict[int, float] = {}
    for share in shares:
        for unit in share.units:
            for index in unit.indices if unit.weight else ():
                weights[index] = weights.get(index, 0.0) + unit.weight / len(unit.indices)
    return tuple(sorted((index, round(weight, 9)) for index, weight in weights.items()))


@cache
def one_process(plan: DataPlan) -> Weights:
    """The same training in one process."""
    group = Group("one", plan)
    while group.position != plan.end:
        share = plan.share(group.position, 0, 1)
        group.commit(_sum([share]))
    return group.weights


def check(plan: DataPlan, weights: Weights) -> None:
    """Raises Broken unless the weights consist of each sample once per epoch, in the batches of one
    process.
    """
    per_epoch = math.ceil(plan.length / plan.global_batch_size)
    if len(weights) != per_epoch * plan.epochs:
        raise Broken(f"{len(weights)} steps, of {per_epoch * plan.epochs}")
    for epoch in range(plan.epochs):
        batches = weights[epoch * per_epoch : (epoch + 1) * per_epoch]
        indices = Counter(index for batch in batches for index, _ in batch)
        if indices != Counter(range(plan.length)):
            raise Broken(f"epoch {epoch} trained on {sorted(indices.elements())}, of range({plan.length})")
        for batch in batches[:-1]:
            if len(batch) != plan.global_batch_size:
                raise Broken(f"a batch of {len(batch)}")
        for batch in batches:
            if {weight for _, weight in batch} != {round(1 / len(batch), 9)}:
                raise Broken(f"the weights of a batch are not those of a mean: {batch}")
    if weights != one_process(plan):
        raise Broken("one process trains on other batches")
    if (
        not plan.shuffle
        and [index for batch in weights for index, _ in batch] != [*range(plan.length)] * plan.epochs
    ):
        raise Broken("the order is not that of the dataset")


class RestlessStart(Job):
    """Several faults in the first steps of a job whose groups begin with different weights."""

    likelier = {  # noqa: RUF012
        "a heal failed": 2,
        "failed in a step": 3,
        "a reduction lacks the groups that failed": 2.5,
    }

    def __init__(self, seed: int, group: type[Group] = Group) -> None:
        super().__init__(seed, group)
        self.init_sync = True


class MixedCheckpoints(Job):
    """Groups are restored from checkpoints that do not match, without the Manager's step."""

    likelier = {"all failed": 3, "restored from different checkpoints": 3}  # noqa: RUF012

    def __init__(self, seed: int, group: type[Group] = Group) -> None:
        super().__init__(seed, group)
        self.init_sync = self.keeps_step = False


class Replays(Job):
    """Groups keep the gradients of steps that are not committed, except some groups; and many fail."""

    likelier = {  # noqa: RUF012
        "a collective failed": 4,
        "failed in a step": 1.5,
        "failed between steps": 0.3,
        "missed a quorum": 2,
        "a stranger asked": 0.3,
        "joined": 2,
    }

    def __init__(self, seed: int, group: type[Group] = Group) -> None:
        super().__init__(seed, group)
        self.keeps = True


def prove(seed: int, group: type[Group] = Group, job: type[Job] = Job) -> Job:
    """Runs one history, and checks it with the oracle."""
    history = job(seed, group)
    try:
        final = history.run()
        if not final:
            raise Broken("no group reached the end")
        for weights in final:
            check(history.plan, weights)
    except Broken as e:
        raise Broken(f"prove({seed}, job={job.__name__}): {e}") from e
    return history
