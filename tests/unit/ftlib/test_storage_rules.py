"""The rules of a shared directory, as tables and in random histories of members that are killed, stall and
return.

A history simulates the directory and the communicators: at most one communicator may work at a time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Optional

import pytest

from tests.bounded import often, todays
from torchft.ftlib.storage_rules import (
    Action,
    Create,
    News,
    Record,
    Take,
    Wait,
    Want,
    decide,
    living,
    news,
)
from torchft.ftlib.views import Identity, Member, View

A, B, C = (Identity(name, 1) for name in "abc")


def view(number: int, *members: Identity) -> View:
    return View(number, tuple(Member(i, i.name) for i in members))


AB = view(1, A, B)


def rec(identity: Identity, wants: int) -> dict[Identity, Record]:
    return {identity: Record(identity.name, wants)}


@pytest.mark.parametrize(
    ("alive", "latest", "min_members", "expected"),
    [
        pytest.param(rec(A, 1), None, 1, Create(view(1, A)), id="alone"),
        pytest.param(rec(A, 1), None, 2, Wait(()), id="too few"),
        pytest.param({**rec(A, 1), **rec(B, 1)}, None, 1, Create(AB), id="the first creates"),
        pytest.param({**rec(A, 1), **rec(B, 1)}, AB, 1, Take(AB), id="a view exists"),
        pytest.param({**rec(A, 1), **rec(B, 2)}, AB, 1, Want(2), id="b has left it"),
        pytest.param(rec(A, 1), AB, 1, Want(2), id="b has failed"),
        pytest.param({**rec(A, 1), **rec(B, 1)}, view(1, B), 1, Want(2), id="created without this member"),
        pytest.param({**rec(A, 2), **rec(B, 1)}, AB, 1, Wait((B,)), id="b trains"),
    ],
)
def test_decide(
    alive: dict[Identity, Record], latest: Optional[View], min_members: int, expected: Action
) -> None:
    assert decide(A, alive, latest, min_members) == expected


def test_the_others_wait_for_the_first() -> None:
    assert decide(B, {**rec(A, 1), **rec(B, 1)}, None) == Wait((A,))


@pytest.mark.parametrize(
    ("alive", "latest", "expected"),
    [
        ({**rec(A, 1), **rec(B, 1)}, 1, News(())),
        ({**rec(A, 1), **rec(B, 1), **rec(C, 2)}, 1, News((C,))),
        # c has not noticed yet that the view does not contain it
        ({**rec(A, 1), **rec(B, 1), **rec(C, 1)}, 1, News(())),
        (rec(A, 1), 1, News((), "b has not renewed its record")),
        ({**rec(A, 1), **rec(B, 2)}, 1, News((), "b has left the view")),
        ({**rec(A, 1), **rec(B, 1)}, 2, News((), "view 2 was created without this member")),
    ],
)
def test_news(alive: dict[Identity, Record], latest: int, expected: News) -> None:
    assert news(A, alive, AB, latest) == expected


def test_of_two_incarnations_the_later_one_counts() -> None:
    again = Identity("a", 2)
    assert living({**rec(A, 1), **rec(again, 1)}) == rec(again, 1)


@dataclass
class Process:
    identity: Identity
    taken: Optional[View] = None
    stalled: bool = False  # whether it has stopped renewing its record


class Directory:
    """Members that act one at a time, each on the current records and views."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.records: dict[Identity, Record] = {}
        self.views: dict[int, View] = {}
        self.processes: dict[str, Process] = {}
        self.lives = 0

    @property
    def latest(self) -> Optional[View]:
        return self.views[max(self.views)] if self.views else None

    def start(self, name: str) -> None:
        self.lives += 1
        identity = Identity(name, self.lives)
        self.processes[name] = Process(identity)
        self.ask(identity)

    def ask(self, identity: Identity) -> None:
        number = self.latest.number if self.latest else 0
        old = self.records.get(identity, Record(identity.name))
        self.records[identity] = old._replace(wants=number + 1)

    def alive(self, observer: Process) -> dict[Identity, Record]:
        """Returns the records that an observer takes for live: its own, and those of members that have not
        stalled.
        """
        stopped = {p.identity for p in self.processes.values() if p.stalled and p is not observer}
        kept = {i: r for i, r in self.records.items() if i not in stopped}
        return living({**kept, observer.identity: self.records[observer.identity]})

    def act(self, process: Process) -> None:
        me = process.identity
        alive = self.alive(process)
        if me not in alive:
            return
        number = self.latest.number if self.latest else 0
        if process.taken is not None:
            seen = news(me, alive, process.taken, number)
            if seen.ended or seen.joining:
                process.taken = None
                self.ask(me)
            return
        action = decide(me, alive, self.latest)
        record = self.records[me]
        if isinstance(action, Want):
            self.records[me] = record._replace(wants=action.number)
        elif isinstance(action, Create):
            self.views.setdefault(action.view.number, action.view)  # the directory creates each number once
        elif isinstance(action, Take):
            process.taken = action.view

    def communicators(self) -> list[View]:
        """Returns the views that all of their members have taken. Each of these connects, and works as long
        as all are in it.
        """
        taken = {p.identity: p.taken for p in self.processes.values() if not p.stalled}
        return [v for v in self.views.values() if all(taken.get(i) == v for i in v.identities)]

    def step(self) -> None:
        name = self.rng.choice("abcd")
        process = self.processes.get(name)
        what = self.rng.random()
        if process is None:
            if what < 0.3:
                self.start(name)
        elif what < 0.03:  # killed: its record is removed at once, as if it had expired
            del self.records[process.identity], self.processes[name]
        elif what < 0.05:
            process.stalled = True
        elif process.stalled:
            process.stalled = what > 0.3
            if not process.stalled and process.taken is not None:
                # A member that could not renew its record reads the directory before it continues.
                self.act(process)
        else:
            self.act(process)


def test_random_histories_have_one_communicator_at_a_time_and_end_in_one_of_all() -> None:
    rng = random.Random(todays(23))
    events = 0
    while events < often(100_000):
        directory = Directory(rng)
        for _ in range(rng.randrange(5, 60)):
            directory.step()
            events += 1
            assert len(directory.communicators()) <= 1
        for name in "abcd":
            if name not in directory.processes:
                directory.start(name)
            directory.processes[name].stalled = False
        for _ in range(40):  # rounds without further failures
            for process in rng.sample(list(directory.processes.values()), 4):
                directory.act(process)
            if [len(v.members) for v in directory.communicators()] == [4]:
                break
        assert [len(v.members) for v in directory.communicators()] == [4], directory.records
