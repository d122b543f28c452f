"""The ranks of a group choose a copy together, and load none that one of them cannot load."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Optional

import pytest
from torch.distributed import HashStore

from tests.unit.waiting import wait_until
from torchft._manager.snapshots.restore import Choice, Ranks, Reachable, given_up
from torchft.checkpointing.snapshots.slots import SlotError

TIMEOUT = timedelta(seconds=20)


class Copies:
    """The copies of one rank. A slot is represented by its step and quorum.

    Args:
        steps: step and quorum of each, the newest first.
        damaged: those of them that are, as is found when they are read.
        misfits: those of another model, as their structure shows.
        late: those of another model, as is found when they are read.
    """

    def __init__(self, *steps: tuple[int, int], damaged: Any = (), misfits: Any = (), late: Any = ()) -> None:
        self.steps, self.damaged, self.misfits, self.late = steps, damaged, misfits, late
        self.said: list[str] = []
        self.announced: list[Optional[tuple[int, int]]] = []
        self.read: list[tuple[int, int]] = []

    def _reach(self, at: tuple[int, int]) -> Reachable:
        def misfit() -> Optional[str]:
            return "another model" if at in self.misfits else None

        def opens(moved: Any) -> Any:
            self.read.append(at)
            if at in self.damaged:
                raise SlotError("it is damaged")
            return at

        return Reachable(*at, f"slot {at}", misfit, opens)

    def choose(self, ranks: Ranks) -> Optional[tuple[int, int]]:
        """Announces and loads until a copy is loaded, or there is none."""
        choice = Choice(ranks, [self._reach(at) for at in self.steps], self.said.append)
        refuses: Any = lambda slot: "late" if slot in self.late else None  # noqa: E731
        while True:
            newest = choice.newest
            self.announced.append(None if newest is None else (newest.step, newest.quorum))
            if newest is None:
                return None
            if (slot := choice.open(refuses)) is not None:
                return slot  # type: ignore[return-value]


def together(*copies: Copies) -> list[Any]:
    store = HashStore()
    with ThreadPoolExecutor(len(copies)) as threads:
        futures = [
            threads.submit(one.choose, Ranks(store, "group:1", rank, len(copies), TIMEOUT))
            for rank, one in enumerate(copies)
        ]
        return [future.result(30) for future in futures]


def test_a_single_rank_needs_no_store() -> None:
    ranks = Ranks(None, "group:1", 0, 1, TIMEOUT)  # type: ignore[arg-type]
    copies = Copies((3, 1), (2, 1), damaged=[(3, 1)])
    assert copies.choose(ranks) == (2, 1)  # type: ignore[comparison-overlap]
    assert copies.said == ["the copy of step 3 in slot (3, 1) is not loaded: it is damaged"]
    assert copies.announced == [(3, 1), (2, 1)]
    assert Copies().choose(ranks) is None


def test_the_newest_copy_that_all_have() -> None:
    assert together(Copies((5, 2), (4, 2)), Copies((4, 2), (3, 1))) == [(4, 2), (4, 2)]
    assert together(Copies((5, 2)), Copies((4, 2))) == [None, None]
    assert together(Copies((5, 2)), Copies()) == [None, None]
    # two histories of step 4: not one rank's part of each
    assert together(Copies((4, 1), (3, 1)), Copies((4, 7), (3, 1))) == [(3, 1), (3, 1)]
    assert together(Copies((4, 1), (4, 7)), Copies((4, 7), (4, 1))) == [(4, 7), (4, 7)]


def test_none_loads_what_one_cannot() -> None:
    steps = (5, 2), (4, 2), (3, 2)
    first, second = Copies(*steps, damaged=[(5, 2)]), Copies(*steps, late=[(4, 2)])
    assert together(first, second) == [(3, 2), (3, 2)]
    assert first.announced == second.announced == [(5, 2), (4, 2), (3, 2)]
    assert len(first.said) == len(second.said) == 1
    assert second.said == ["the copy of step 4 in slot (4, 2) is not loaded: late"]


def test_a_structure_that_does_not_fit_one_rank_is_not_announced() -> None:
    steps = (5, 2), (4, 2)
    first, second = Copies(*steps), Copies(*steps, misfits=[(5, 2)])
    assert together(first, second) == [(4, 2), (4, 2)]
    assert first.announced == second.announced == [(4, 2)]
    assert first.read == second.read == [(4, 2)]
    assert second.said == ["the copy of step 5 in slot (5, 2) is not loaded: another model"]


@pytest.mark.parametrize(
    ("found", "states"),
    [
        ([(500, 1, 10.0), (499, 1, 9.0)], set()),
        ([(500, 1, 10.0), (300, 2, 20.0), (310, 2, 21.0)], {(500, 1)}),
        ([(500, 1, 10.0), (490, 1, 9.0), (495, 2, 20.0)], {(500, 1)}),  # the job went on from step 490
        ([(500, 7, 10.0), (900, 2, 20.0)], set()),  # the ids have begun anew
        ([(500, 7, 10.0), (300, 2, 20.0)], set()),  # nothing tells
    ],
)
def test_copies_of_a_history_that_the_job_has_given_up(
    found: list[tuple[int, int, float]], states: set[tuple[int, int]]
) -> None:
    never: Any = None
    shown = given_up([Reachable(step, quorum, "here", never, never, saved) for step, quorum, saved in found])
    assert {(one.step, one.quorum) for one, _ in shown} == states
    assert all(other.step < one.step for one, other in shown)


def test_a_rank_that_does_not_come() -> None:
    ranks = Ranks(HashStore(), "group:1", 0, 2, timedelta(milliseconds=50))
    with pytest.raises(RuntimeError):
        Copies((5, 2)).choose(ranks)


class _TimesOut:
    """A store whose waits for the loads of the other ranks time out three times, each when that rank has got
    on, if it does.
    """

    def __init__(self, store: HashStore, moves: bool) -> None:
        self._store, self._moves, self.timeouts = store, moves, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def moved(self) -> int:
        return self._store.add("torchft/restore/group:1/moves", 0)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if "/3/" in keys[0] and self.timeouts < 3:  # the first two exchanges are those of the choice
            self.timeouts += 1
            wait_until(lambda: not self._moves or self.moved() == self.timeouts)
            raise RuntimeError("timed out")
        self._store.wait(keys, timeout)


@pytest.mark.parametrize("moves", [True, False])
def test_a_load_that_takes_longer_than_the_timeout(moves: bool) -> None:
    """The other rank waits as long as it gets on, and no longer."""
    store = HashStore()
    waits = _TimesOut(store, moves)
    stores: list[Any] = [store, waits]
    ranks = [Ranks(stores[rank], "group:1", rank, 2, TIMEOUT) for rank in range(2)]

    def slow(moved: Any) -> Any:
        for timeouts in range(1, 4 if moves else 2):
            wait_until(lambda timeouts=timeouts: waits.timeouts == timeouts)  # type: ignore[misc]
            if moves:
                ranks[0]._told = 0.0  # otherwise it says so once in a quarter of the timeout
                moved()
        return "slow"

    def load(rank: int, opens: Any) -> Any:
        reach = [Reachable(5, 2, "here", lambda: None, opens)]
        return Choice(ranks[rank], reach, print).open(lambda slot: None)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(load, 0, slow)
        second = threads.submit(load, 1, lambda moved: "fast")
        if moves:
            assert (first.result(60), second.result(60)) == ("slow", "fast")
            assert waits.timeouts == 3
        else:
            with pytest.raises(RuntimeError, match="timed out"):
                second.result(60)
            assert first.result(60) == "slow"


def test_random_histories() -> None:
    draw = random.Random(46)
    for _ in range(60):
        count = draw.randint(1, 3)
        possible = [(step, 1 + step // 3) for step in range(6)]
        ranks = []
        for _ in range(count):
            steps = sorted(draw.sample(possible, draw.randint(0, 5)), reverse=True)
            damaged = [at for at in steps if draw.random() < 0.3]
            ranks.append(Copies(*steps, damaged=damaged))
        good = set.intersection(*(set(one.steps) - set(one.damaged) for one in ranks))
        assert together(*ranks) == [max(good, default=None)] * count
    assert threading.active_count() < 50
