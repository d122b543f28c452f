"""Compares a heal in passing with an oracle: the state that results from all committed gradients, in
order.
"""

from __future__ import annotations

import random
from typing import Any, Optional, cast

import pytest

from tests.bounded import often
from tests.unit.manager.test_together import Store
from torchft._manager.heal import in_passing_rules
from torchft._manager.heal.in_passing_rules import (
    FIRST,
    LEAST,
    MAX_IDLE_SEC,
    MAX_RESTARTS,
    MOST,
    Ask,
    Heal,
)
from torchft._manager.heal.together import GroupRanks, HealingRanks, Progress


def heal_in(step: int, total: int = 3) -> Heal:
    """A heal of which two elements have arrived in this step of quorum 1."""
    heal = Heal(total)
    assert heal.quorum(step, 1, 1, 0.0)
    heal.arrived(Ask(0, 2, 0, 0), 1.0)
    return heal


@pytest.mark.parametrize(
    ("applied", "quorum", "stays"),
    [
        (True, (8, 1, 1), True),
        # The source failed after its report, and the others did not commit step 7.
        (True, (7, 2, 1), False),
        (True, (8, 2, 2), False),  # the others committed another attempt at step 7
        (True, (9, 1, 1), False),
        (False, (7, 2, 1), True),
        # The reduction failed only here, or the source did not answer: the others committed the step.
        (False, (8, 1, 1), False),
    ],
)
def test_what_the_next_quorum_says_of_a_step(
    applied: bool, quorum: tuple[int, int, int], stays: bool
) -> None:
    heal = heal_in(7)
    if applied:
        heal.applied()
    assert heal.quorum(*quorum, 0.0) is stays
    assert heal.here == (2 if stays else 0)
    assert heal.next() == (heal.here, 3, 0, 0)


def test_an_attempt_without_a_vote_changes_nothing() -> None:
    heal = heal_in(7)
    heal.applied()
    assert heal.quorum(8, 1, 1, 0.0)
    assert heal.quorum(8, 2, 1, 0.0)
    assert heal.next() == (2, 3, 0, 0)


def test_nothing_is_lost_before_the_first_part() -> None:
    heal = Heal(3)
    for step in range(2 * MAX_RESTARTS):
        assert heal.quorum(step, 1, 1, 0.0)
    assert heal.abandoned is None


def test_all_that_is_here_is_compared_in_a_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_passing_rules, "FIRST", 1)
    heal = heal_in(7, total=3)
    heal.applied()
    heal.quorum(8, 1, 1, 0.0, together=False)
    assert heal.next() == (2, 3, 0, 0)
    heal.arrived(heal.next(), 1.0)
    assert heal.next().empty, "no gradient was applied to the last part"
    heal.applied()
    heal.quorum(9, 1, 1, 0.0, together=False)
    for ask in ((3, 3, 0, 2), (3, 3, 2, 3)):
        assert heal.next() == ask and not heal.complete
        heal.compared(heal.next(), equal=True)
    assert heal.complete and heal.waits and not heal.ends
    for ask in ((3, 3, 0, 2), (3, 3, 2, 3), (3, 3, 0, 2)):  # again, until the other ranks are as far
        assert heal.next() == ask
        heal.compared(heal.next(), equal=True)
        assert heal.complete
    heal.applied()
    heal.quorum(10, 1, 1, 0.0)
    assert heal.ends and not heal.waits
    heal.compared(heal.next(), equal=False)
    assert heal.abandoned is not None


def test_the_size_of_parts() -> None:
    heal = Heal(1 << 40)
    heal.quorum(7, 1, 1, 0.0)
    assert heal.next() == (0, FIRST, 0, 0)
    heal.late()
    assert heal.next().end == FIRST // 2
    heal.arrived(heal.next(), share=0.5)
    assert heal.next().end - heal.here == FIRST // 2
    for _ in range(20):
        heal.arrived(heal.next(), share=0.01)
    assert heal.next().end - heal.here == MOST
    for _ in range(20):
        heal.late()
    assert heal.next().end - heal.here == LEAST


def test_a_vote_waits_longer_while_answers_are_late() -> None:
    heal = Heal(3)
    heal.quorum(7, 1, 1, 0.0)
    waits = []
    for _ in range(12):
        waits.append(heal.patience)
        heal.late()
    assert waits[:4] == [0.01, 0.02, 0.04, 0.08] and waits[-3:] == [2.0, 2.0, 2.0]
    heal.arrived(heal.next(), 1.0)
    assert heal.patience == 0.01


def test_it_gives_up_with_a_reason() -> None:
    heal = Heal(1)
    for step in range(MAX_RESTARTS + 1):
        assert heal.abandoned is None
        heal.quorum(2 * step, 1, 1, 0.0)
        heal.arrived(Ask(0, 1, 0, 0), 1.0)
    heal.quorum(100, 1, 1, 0.0)
    assert heal.abandoned == "a committed step was missed 4 times"

    heal = Heal(1)
    for step, now in enumerate((0.0, MAX_IDLE_SEC, MAX_IDLE_SEC + 1)):
        assert heal.abandoned is None
        heal.quorum(step, 1, 1, now)
        heal.applied()
    assert heal.abandoned == "in 61 s nothing of the state has arrived in its step"

    heal = heal_in(7)
    heal.compared(Ask(0, 0, 0, 2), equal=False)
    assert (
        heal.abandoned is not None
        and "differ from the source's in step 7, in the elements 0 to 2" in heal.abandoned
    )
    heal.abandon("a later reason")
    assert "differ" in heal.abandoned


@pytest.mark.parametrize(
    "key", ["part.1.2.3", "part.1.2.3.x", "part.1.2.3.-4", "rest.1.2.3.4", "part.1.2.3.4.5", ""]
)
def test_the_key_of_a_request(key: str) -> None:
    assert Ask.parse(Ask(1, 20, 3, 4).key) == (1, 20, 3, 4) and not Ask(1, 20, 3, 4).empty
    assert Ask.parse(Ask(1, 1, 3, 3).key).empty
    with pytest.raises(ValueError, match="no part of a state"):
        Ask.parse(key)


class Job:
    """A model of groups that train in lockstep, and of targets that train along.

    A name represents a gradient. The list of the applied gradients' names represents a state.
    """

    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self.committed: list[str] = []  # the oracle: all committed gradients, in order
        self.step = 0
        self.quorum_id = 1
        self.committed_quorum_id = 1
        self.attempt = 0
        self.alive = True  # whether the source of the present quorum answers

    def quorum(self) -> None:
        if not self.alive:
            self.quorum_id += 1
            self.alive = True

    def commit(self, name: str) -> None:
        self.committed.append(name)
        self.step += 1
        self.committed_quorum_id = self.quorum_id


class Target:
    """A group that heals. It carries out the decisions of `Heal` on lists of names."""

    def __init__(self, job: Job, total: int) -> None:
        self.job = job
        self.heal = Heal(total)
        self.state: list[list[str]] = [[] for _ in range(total)]
        self.confirmed = 0  # gradients that were applied because the source reported its commit
        self.late = 0  # parts

    def quorum(self, together: bool = True) -> None:
        job = self.job
        self.heal.quorum(job.step, job.quorum_id, job.committed_quorum_id, 0.0, together)

    def ask(self) -> None:
        """Sends one request, which may be answered too late."""
        job, heal, ask = self.job, self.heal, self.heal.next()
        if heal.abandoned is not None or heal.ends or not job.alive or ask.empty:
            return
        if job.random.random() < 0.1:
            self.late += 1
            heal.late()
            return
        if ask.same_to > ask.same_from:
            same = all(self.state[element] == job.committed for element in range(ask.same_from, ask.same_to))
            heal.compared(ask, same)
            return
        for element in range(ask.begin, ask.end):
            self.state[element] = list(job.committed)
        heal.arrived(ask, job.random.random())

    def vote(self, gradient: Optional[str], committed: bool) -> bool:
        """Ends a step. Returns whether this group has the complete state.

        Args:
            gradient: the averaged gradient; None if a reduction failed.
            committed: whether the source reports that it committed the step, if it is asked and answers.
        """
        if self.heal.ends:
            return self.job.alive  # the rest of the state arrives
        if gradient is not None and committed and self.job.random.random() < 0.99:
            self.heal.applied()
            for state in self.state:  # also to elements that are missing: they are replaced later
                state.append(gradient)
            self.confirmed += 1
        return False


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "histories" in request.node.name:
        for name, value in (("FIRST", 2), ("LEAST", 1), ("MOST", 4)):
            monkeypatch.setattr(in_passing_rules, name, value)


# The slow parts differ from part 0 only in their seeds.
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_random_histories_end_with_the_state_that_all_committed_gradients_give(part: int) -> None:
    """Steps fail for all or are missed by the target, quorums change, the source fails, a second group
    joins.
    """
    healed = abandoned = confirmed = lied = late = 0
    histories = often(1000)
    for seed in range(1000 * part, 1000 * part + histories):
        chance = random.Random(seed)
        trouble = chance.choice([0.0, 0.05, 0.2])
        job, total = Job(chance), chance.randrange(1, 15)
        targets = [Target(job, total)]
        for _ in range(200):
            if chance.random() < 0.02 and len(targets) < 2:
                targets.append(Target(job, total))
                job.quorum_id += 1
            if chance.random() < trouble / 4:  # a target fails, and restarts without any state
                targets[chance.randrange(len(targets))] = Target(job, total)
                job.quorum_id += 1
            job.quorum()
            job.attempt += 1
            gradient = f"{job.step}.{job.attempt}"
            fails = chance.random() < trouble
            alone = fails and chance.random() < 0.3
            absent = [t for t in targets if chance.random() < trouble / 8]  # not in this quorum
            if absent:
                job.quorum_id += 1
            present = [t for t in targets if t not in absent]
            for target in present:
                target.quorum()
                for _ in range(chance.randrange(4)):
                    target.ask()
            if alone:  # the source commits the step alone, and then fails
                lied += 1
            if alone or chance.random() < trouble / 2:
                job.alive = False
            for target in list(present):
                target.ask()
                if chance.random() < trouble / 4:
                    continue  # after an error, this target's step ends without a vote
                seen = None if chance.random() < trouble / 4 else gradient
                if fails and chance.random() < 0.5:
                    seen = None
                if target.heal.abandoned is None and target.vote(seen, not fails or alone):
                    assert target.state == [job.committed] * total, seed
                    healed += 1
                    confirmed += target.confirmed
                    late += target.late
                    targets.remove(target)
            for target in list(targets):
                if target.heal.abandoned is not None:
                    assert "differ" not in target.heal.abandoned, seed
                    abandoned += 1
                    targets.remove(target)
            if not targets:
                break
            if fails:
                job.quorum_id += 1
            else:
                job.commit(gradient)
    assert healed > 0.9 * histories
    assert late > histories / 2 and confirmed > histories and lied > 0.05 * histories
    assert abandoned < healed / 4


def test_random_histories_of_groups_of_several_ranks() -> None:
    """All ranks of a group end their heals in the same step, also if one rank votes no."""
    healed = again = 0
    histories = often(1600)
    for seed in range(histories):
        chance = random.Random(seed)
        trouble = chance.choice([0.0, 0.05, 0.2])
        job = Job(chance)
        store = Store()
        ranks = [HealingRanks(GroupRanks(cast(Any, store), "group:uuid", number, 3)) for number in range(3)]
        targets = [Target(job, chance.randrange(1, 20)) for _ in ranks]
        for _ in range(200):
            job.attempt += 1
            gradient = f"{job.step}.{job.attempt}"
            reported = [rank.group_progress(job.step) for rank in ranks]
            fails = chance.random() < trouble
            votes = []
            for target, rank, progress in zip(targets, ranks, reported):
                target.quorum(together=progress is Progress.READY)
                for _ in range(chance.randrange(4)):
                    target.ask()
                votes.append(target.vote(gradient, not fails))
                if target.heal.complete:
                    rank.report(job.step, Progress.READY)
            assert len(set(reported)) == 1, "all come to the same"
            if all(votes) and chance.random() > trouble:
                for target in targets:
                    assert target.state == [job.committed] * target.heal.total, seed
                healed += 1
                break
            again += all(votes)
            if fails:
                job.quorum_id += 1  # the step failed in all groups
            else:
                job.commit(gradient)
        reasons = [target.heal.abandoned for target in targets if target.heal.abandoned is not None]
        # A gradient that cannot be applied is rare, but so are four of them in one heal.
        assert all("a committed step was missed" in reason for reason in reasons), (seed, reasons)
    assert healed > 0.9 * histories and again > 0
