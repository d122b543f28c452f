"""Compares a heal in pieces with an oracle: the state that results from all committed gradients, in order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Optional

import pytest

from tests.bounded import often
from tests.unit.manager.test_together import Store
from torchft._manager.along import MAX_IDLE_SEC, MAX_RESTARTS, Fate, Heal, Kind, Piece, cut
from torchft._manager.sources import Sources
from torchft._manager.together import Progress, Ranks


@pytest.mark.parametrize(
    ("sizes", "most", "pieces"),
    [
        ([], 4, []),
        ([0], 4, [Piece(0, 0, 0)]),
        ([4], 4, [Piece(0, 0, 4)]),
        ([5, 1], 4, [Piece(0, 0, 4), Piece(0, 4, 5), Piece(1, 0, 1)]),
    ],
)
def test_cut(sizes: list[int], most: int, pieces: list[Piece]) -> None:
    assert cut(sizes, most) == pieces


@pytest.mark.parametrize(
    ("kept", "quorum", "fate"),
    [
        (True, (8, 1, 1), Fate.APPLY),
        (True, (7, 2, 1), Fate.AGAIN),
        (True, (8, 2, 2), Fate.MISSED),  # step 7 was committed in a quorum without this group
        (True, (9, 1, 1), Fate.MISSED),
        (False, (7, 2, 1), Fate.NONE),
        (False, (8, 1, 1), Fate.MISSED),  # the reduction failed only in this group: the others committed the step
    ],
)
def test_what_the_next_quorum_says_of_a_step(kept: bool, quorum: tuple[int, int, int], fate: Fate) -> None:
    heal = Heal(cut([1], 1))
    assert heal.quorum(7, 1, 1) is Fate.NONE
    heal.advance([], 0.0)
    if kept:
        heal.keep(set())
    assert heal.quorum(*quorum) is fate


@pytest.mark.parametrize(
    ("quorum", "fate"),
    [
        ((8, 1, 1), Fate.NONE),
        ((7, 2, 1), Fate.MISSED),  # the source failed after its report, and the others did not commit step 7
        ((8, 2, 2), Fate.MISSED),  # the others committed another attempt at step 7
        ((9, 1, 1), Fate.MISSED),
    ],
)
def test_a_gradient_that_the_source_has_committed_is_applied_at_once(quorum: tuple[int, int, int], fate: Fate) -> None:
    heal = Heal(cut([1, 1, 1], 1))
    heal.quorum(7, 1, 1)
    heal.advance([], 0.0)
    heal.place(1, 7)
    heal.keep({0})
    assert heal.committed() == {1}
    assert not heal.place(0, 7), "it came too late"
    assert not heal.early(8) and heal.place(0, 8)
    assert heal.next(set()) == (Kind.PIECE, 2) and heal.next({2}) == (Kind.DIGEST, 1)
    assert heal.quorum(*quorum) is fate
    assert heal.missing == (1 if fate is Fate.NONE else 3) and not heal.applies


def test_where_all_of_a_step_is_late_the_next_is_asked_for_in_halves() -> None:
    heal = Heal(cut([8], 8), least=2)
    for step in range(7, 10):
        heal.quorum(step, 1, 1)
        ask = heal.next(set())
        assert ask is not None and heal.pieces[ask.number] == Piece(0, 0, 8 if step < 9 else 4)
        heal.advance([], 0.0)
        heal.keep({ask.number})
        heal.committed()
        heal.place(ask.number, step)


def test_an_attempt_without_a_vote_leaves_the_gradient_to_the_next_one() -> None:
    heal = Heal(cut([1], 1))
    heal.quorum(7, 1, 1)
    heal.advance([], 0.0)
    heal.place(0, 7)
    heal.keep(set())
    assert heal.quorum(8, 1, 1) is Fate.APPLY
    assert heal.quorum(8, 2, 1) is Fate.APPLY
    assert heal.advance([], 0.0).apply


@pytest.mark.parametrize(("mark", "before"), [(6, []), (7, [0]), (9, [])])
def test_where_an_arrival_belongs(mark: int, before: list[int]) -> None:
    heal = Heal(cut([1], 1))
    heal.quorum(7, 1, 1)
    heal.advance([], 0.0)
    heal.keep(set())
    heal.quorum(8, 1, 1)
    todo = heal.advance([(0, mark)], 0.0)
    assert (todo.before, todo.apply) == (before, True)
    assert todo.parameters == ({0} if before else set())


def test_a_piece_is_put_in_place_with_others_of_its_step() -> None:
    heal = Heal(cut([1, 1, 1, 1], 1))
    heal.quorum(7, 1, 1)
    assert heal.early(7)
    heal.advance([], 0.0)
    assert not heal.early(7) and heal.early(8)
    assert heal.place(0, 7) and not heal.place(1, 6)
    assert heal.keep({1}) == {0, 1, 2}  # in place, requested, to be requested next
    assert not heal.place(3, 7)  # the gradient of its parameter in step 7 was not kept
    assert heal.quorum(8, 1, 1) is Fate.APPLY
    assert heal.place(1, 7) and heal.early(8)
    assert heal.advance([], 0.0).parameters == {0, 1}
    assert heal.place(3, 8)
    heal.quorum(10, 1, 1)  # the commits of steps 8 and 9 were missed
    assert heal.missing == 4 and heal.early(8)


def test_it_gives_up_with_a_reason() -> None:
    heal = Heal(cut([1], 1))
    for step in range(MAX_RESTARTS + 1):
        assert heal.abandoned is None
        heal.quorum(2 * step, 1, 1)
        heal.advance([], 0.0)
        heal.place(0, 2 * step)
    heal.quorum(100, 1, 1)
    assert heal.abandoned == "a committed step was missed 4 times"

    heal = Heal(cut([1], 1))
    for step, now in enumerate((0.0, MAX_IDLE_SEC, MAX_IDLE_SEC + 1)):
        assert heal.abandoned is None
        heal.quorum(step, 1, 1)
        heal.advance([], now)
        heal.keep(set())
    assert heal.abandoned is not None and "nothing of the state arrived" in heal.abandoned


def test_a_piece_that_differs_is_asked_for_again_unless_the_assigned_source_gave_it() -> None:
    heal = Heal(cut([1], 1))
    heal.quorum(7, 1, 1)
    heal.advance([], 0.0)
    heal.place(0, 7)
    heal.compared(0, equal=False, from_assigned=False)
    assert heal.next(set()) == (Kind.PIECE, 0) and heal.abandoned is None
    heal.compared(0, equal=False)
    assert heal.abandoned is not None and "differ from the source's" in heal.abandoned


def elements(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(piece.parameter, element) for piece in pieces for element in range(piece.begin, piece.end)]


def test_what_takes_longer_than_a_step_is_asked_for_in_halves() -> None:
    heal = Heal(cut([8, 8], 8), least=2)
    for step in range(0, 12, 2):  # an answer takes two steps
        heal.quorum(step, 1, 1)
        ask = heal.next(set())
        assert ask is not None and ask.kind is Kind.PIECE
        heal.advance([(ask.number, step - 2)] if step else [], 0.0)
    ask = heal.next(set())
    assert ask is not None
    assert heal.pieces[ask.number] == Piece(0, 0, 2)
    assert sorted(elements(heal.pieces)) == sorted(elements(cut([8, 8], 1)))


class Job:
    """A model of groups that train in lockstep, and of targets that heal along.

    A name represents a gradient. The list of the applied gradients' names represents a state.

    The weights of one source may differ from those of the other sources. That source is never the assigned one.
    """

    def __init__(self, random_: random.Random) -> None:
        self.random = random_
        self.committed: list[str] = []  # the oracle: all committed gradients, in order
        self.step = 0
        self.quorum_id = 1
        self.committed_quorum_id = 1
        self.attempt = 0
        self.now = 0.0
        self.groups = 0  # number of sources that were started
        self.named: list[str] = []  # the sources that the quorum names, the assigned one first
        self.alive: set[str] = set()
        self.differs = ""
        for _ in range(random_.randrange(1, 4)):
            self.start()

    def start(self) -> None:
        """Adds a source that is up to date."""
        self.groups += 1
        self.alive.add(f"source {self.groups}")

    def fails(self) -> None:
        """Lets a source fail, unless it is the last one. The current quorum still names it."""
        if len(self.alive) > 1:
            self.alive.remove(self.random.choice(sorted(self.alive)))
            self.quorum_id += 1

    def quorum(self) -> None:
        """Names the sources in a random order, if they have changed."""
        if self.named and not set(self.named) - self.alive and len(self.named) == len(self.alive):
            return
        self.named = self.random.sample(sorted(self.alive), len(self.alive))
        if self.named[0] == self.differs:
            self.differs = ""  # the difference was found, and the source has healed

    def commit(self, name: str) -> None:
        self.committed.append(name)
        self.step += 1
        self.committed_quorum_id = self.quorum_id


class Target:
    """A group that heals. It carries out the decisions of `Heal` on lists of names."""

    def __init__(self, job: Job, sizes: list[int]) -> None:
        self.job = job
        self.heal = Heal(cut(sizes, 2), least=1)
        self.state: dict[int, list[str]] = {}  # by number of the piece
        self.kept: Optional[str] = None
        self.keeps: set[int] = set()
        self.flying: list[tuple[Kind, int, int, list[str]]] = []  # answers that have not arrived
        self.rest: Optional[int] = None
        self.arrived: list[tuple[Kind, int, int, list[str]]] = []  # answers that have arrived and are not processed
        self.sources = Sources()
        self.given: dict[int, tuple[str, bool]] = {}  # by piece: its source, and whether that was assigned
        self.asked: set[str] = set()  # sources
        self.differed = 0  # pieces
        self.early = 0  # gradients that were applied before the vote
        self.confirmed = 0  # gradients that were applied because the source reported its commit

    def quorum(self, together: bool = True) -> None:
        job = self.job
        self.sources.quorum(job.named[0], job.named[1:])
        self.heal.quorum(job.step, job.quorum_id, job.committed_quorum_id, together)

    def ask(self) -> None:
        """Sends one request. The source answers it with its current state; the answer arrives later."""
        self.work()
        ask = self.heal.next(self.on_their_way())
        if ask is None or any(kind is Kind.REST for kind, _, _, _ in self.flying):
            return
        job = self.job
        while (source := self.sources.pick(ask.kind is Kind.PIECE, job.now)) is not None and source not in job.alive:
            if not self.sources.failed(source, job.now):
                self.heal.abandon("requests failed")
        if source is None:
            return
        self.sources.answered(source)
        state = list(job.committed)
        if ask.kind is Kind.PIECE:
            self.asked.add(source)
            self.given[ask.number] = source, source == self.sources.assigned
            state += ["a flipped bit"] * (source == job.differs)
        self.flying.append((ask.kind, ask.number, job.step, state))

    def on_their_way(self) -> set[int]:
        return {number for kind, number, _, _ in (*self.flying, *self.arrived) if kind is not Kind.REST}

    def work(self) -> None:
        """Does the request thread's work between votes: processes arrived answers, and applies the last gradient."""
        heal, chance = self.heal, self.job.random
        while chance.random() < 0.7 and self.take_up():
            pass
        if heal.unverified == 0 and heal.applies and chance.random() < 0.7:
            todo = heal.advance([], 0.0)
            assert todo.apply and todo.parameters <= self.keeps and not todo.before
            self.apply()
            self.early += 1

    def take_up(self) -> bool:
        ready = [one for one in self.arrived if not self.heal.early(one[2])]
        if not ready:
            return False
        kind, number, mark, value = ready[0]
        self.arrived.remove(ready[0])
        if kind is Kind.PIECE and self.heal.place(number, mark):
            self.state[number] = value[:]
        elif kind is Kind.DIGEST and self.heal.comparable(number, mark):
            equal, (giver, as_assigned) = self.state[number] == value, self.given[number]
            self.heal.compared(number, equal, as_assigned and giver == self.sources.assigned)
            if not equal:
                self.differed += self.sources.drop(giver)
        return True

    def apply(self) -> None:
        assert self.kept is not None
        for state in self.state.values():  # to whole parameters: pieces that are not in place are replaced later
            state.append(self.kept)

    def vote(self, gradient: Optional[str], committed: bool) -> bool:
        """Ends a step. Returns whether this group has the complete state.

        Args:
            gradient: the averaged gradient; None if a reduction failed.
            committed: whether the assigned source reports that it committed the step, if it is asked and answers.
        """
        job, heal, chance = self.job, self.heal, self.job.random
        come = [item for item in self.flying if chance.random() < 0.7]
        self.flying = [item for item in self.flying if item not in come]
        self.arrived += [item for item in come if item[0] is not Kind.REST]
        pieces = [item for item in self.arrived if item[0] is Kind.PIECE and item[2] != job.step]
        self.arrived = [item for item in self.arrived if item not in pieces]
        todo = heal.advance([(number, mark) for _, number, mark, _ in pieces], 0.0)
        for index in todo.before:
            self.state[pieces[index][1]] = pieces[index][3][:]
        if todo.apply:
            assert todo.parameters <= self.keeps
            self.apply()
        for kind, _, mark, _ in come:
            if kind is Kind.REST:
                self.rest = mark
        self.take_up()
        self.kept = None
        if gradient is not None:
            self.kept = gradient
            self.keeps = heal.keep(self.on_their_way())
            for _ in range(chance.randrange(3)):  # the request thread does not wait for the next quorum
                self.ask()
        if heal.done(self.rest):
            return True
        if gradient is not None and committed and chance.random() < 0.6:
            assert heal.committed() <= self.keeps
            self.apply()
            self.confirmed += 1
        return False


# The slow parts differ from part 0 only in their seeds.
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))])
def test_random_histories_end_with_the_state_that_all_committed_gradients_give(part: int) -> None:
    """Steps fail for all or are missed by the target, quorums change, sources fail or differ, a second group joins."""
    healed = abandoned = smaller = several = differed = early = confirmed = lied = 0
    histories = often(1000)
    for seed in range(1000 * part, 1000 * part + histories):
        chance = random.Random(seed)
        trouble = chance.choice([0.0, 0.05, 0.2])
        job = Job(chance)
        sizes = [chance.randrange(6) for _ in range(chance.randrange(1, 4))]
        targets = [Target(job, sizes)]
        for _ in range(200):
            if chance.random() < 0.02 and len(targets) < 2:
                targets.append(Target(job, sizes))
                job.quorum_id += 1
            if chance.random() < trouble / 4 and targets:  # a target fails, and restarts without any state
                targets[chance.randrange(len(targets))] = Target(job, sizes)
                job.quorum_id += 1
            if chance.random() < trouble / 4:
                job.start()
            if chance.random() < trouble / 2:
                job.differs = chance.choice(sorted(job.alive - {*job.named[:1]}) or [""])
            job.quorum()
            job.attempt += 1
            job.now += chance.random()
            gradient = f"{job.step}.{job.attempt}"
            fails = chance.random() < trouble
            alone = fails and chance.random() < 0.3 and len(job.alive) > 1
            absent = [t for t in targets if chance.random() < trouble / 8]  # not in this quorum
            if absent:
                job.quorum_id += 1
            present = [t for t in targets if t not in absent]
            for target in present:
                target.quorum()
                for _ in range(chance.randrange(4)):
                    target.ask()
            if alone:  # the assigned source commits the step alone, and then fails
                job.alive.discard(job.named[0])
                lied += 1
            elif chance.random() < trouble / 2:  # between two requests of this step
                job.fails()
            for target in list(present):
                if chance.random() < trouble / 4:
                    continue  # after an error, this target's step ends without a vote
                seen = None if chance.random() < trouble / 4 else gradient
                if fails and chance.random() < 0.5:
                    seen = None
                if target.heal.abandoned is None and target.vote(seen, not fails or alone):
                    assert target.state == dict.fromkeys(range(len(target.heal.pieces)), job.committed), seed
                    assert sorted(elements(target.heal.pieces)) == sorted(elements(cut(sizes, 1))), seed
                    smaller += len(target.heal.pieces) > len(cut(sizes, 2))
                    healed += 1
                    several += len(target.asked) > 1
                    differed += target.differed
                    early += target.early
                    confirmed += target.confirmed
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
    assert smaller > 0 and several > 0.1 * histories and differed > 0
    assert early > 0.1 * histories and confirmed > histories and lied > 0.1 * histories
    assert abandoned < healed


def test_random_histories_of_groups_of_several_ranks() -> None:
    """All ranks of a group end their heals in the same step.

    This also holds if one rank does not receive the rest of the state, or votes no.
    """
    healed = early = 0
    histories = often(400)
    for seed in range(histories):
        chance = random.Random(seed)
        trouble = chance.choice([0.0, 0.05, 0.2])
        job = Job(chance)
        store = Store()
        ranks = [Ranks(store, "group:uuid", number, 3) for number in range(3)]
        targets = [Target(job, [chance.randrange(9) for _ in range(chance.randrange(1, 4))]) for _ in ranks]
        for _ in range(200):
            job.quorum()
            job.attempt += 1
            gradient = f"{job.step}.{job.attempt}"
            reported = [rank.group_progress(job.step) for rank in ranks]
            fails = chance.random() < trouble
            votes = []
            for target, rank, progress in zip(targets, ranks, reported):
                target.quorum(together=progress is Progress.READY)
                for _ in range(chance.randrange(4)):
                    target.ask()
                if target.heal.ends and chance.random() > trouble:
                    target.rest = job.step  # the vote waits for the rest of the state
                votes.append(target.vote(gradient, not fails) and chance.random() > trouble)
                if target.heal.unverified == 0:
                    rank.report(job.step, Progress.READY)
            assert len(set(reported)) == 1, "all come to the same"
            if all(votes):
                for target in targets:
                    assert target.state == dict.fromkeys(range(len(target.heal.pieces)), job.committed), seed
                healed += 1
                break
            early += any(votes)
            if fails:
                job.quorum_id += 1  # the step failed in all groups
            else:
                job.commit(gradient)
        assert all(target.heal.abandoned is None for target in targets), seed
    assert healed > 0.97 * histories and early > 0
