"""The ranks of a group choose a copy together, and load nothing that one of them cannot load."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Optional

import pytest
from torch.distributed import HashStore

from torchft._manager.snapshots.restore import Ranks, Reachable, choose
from torchft.checkpointing.snapshots.slots import SlotError

TIMEOUT = timedelta(seconds=20)


class Copies:
    """The copies of one rank. A slot is represented by its step and quorum."""

    def __init__(self, *steps: tuple[int, int], damaged: Any = (), misfits: Any = ()) -> None:
        self.steps, self.damaged, self.misfits = steps, damaged, misfits
        self.said: list[str] = []

    def _open(self, at: tuple[int, int]) -> Any:
        if at in self.damaged:
            raise SlotError("it is damaged")
        return at

    def choose(self, ranks: Ranks) -> Optional[tuple[int, int]]:
        def opens(at: tuple[int, int]) -> Callable[[], Any]:
            return lambda: self._open(at)

        reach = [Reachable(*at, f"slot {at}", opens(at)) for at in self.steps]
        refuses: Any = lambda slot: "another model" if slot in self.misfits else None  # noqa: E731
        return choose(ranks, reach, refuses, self.said.append)  # type: ignore[return-value]


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
    assert Copies().choose(ranks) is None


def test_the_newest_copy_that_all_have() -> None:
    assert together(Copies((5, 2), (4, 2)), Copies((4, 2), (3, 1))) == [(4, 2), (4, 2)]
    assert together(Copies((5, 2)), Copies((4, 2))) == [None, None]
    assert together(Copies((5, 2)), Copies()) == [None, None]


def test_none_loads_what_one_cannot() -> None:
    steps = (5, 2), (4, 2), (3, 2)
    first, second = Copies(*steps, damaged=[(5, 2)]), Copies(*steps, misfits=[(4, 2)])
    assert together(first, second) == [(3, 2), (3, 2)]
    assert len(first.said) == len(second.said) == 1
    assert second.said == ["the copy of step 4 in slot (4, 2) is not loaded: another model"]


def test_another_place_of_a_damaged_copy() -> None:
    opened: list[str] = []

    def opens(where: str, fails: bool) -> Callable[[], Any]:
        def open_it() -> Any:
            opened.append(where)
            if fails:
                raise SlotError("it is damaged")
            return where

        return open_it

    ranks = Ranks(None, "group:1", 0, 1, TIMEOUT)  # type: ignore[arg-type]
    reach = [Reachable(5, 2, "own", opens("own", True)), Reachable(5, 2, "other", opens("other", False))]
    assert choose(ranks, reach, lambda slot: None, lambda text: None) == "other"  # type: ignore[comparison-overlap]
    assert opened == ["own", "other"]


def test_a_rank_that_does_not_come() -> None:
    ranks = Ranks(HashStore(), "group:1", 0, 2, timedelta(milliseconds=50))
    with pytest.raises(RuntimeError):
        Copies((5, 2)).choose(ranks)


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
