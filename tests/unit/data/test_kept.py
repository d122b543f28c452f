"""The units that groups keep of a step that was not committed, and the division of the others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.bounded import often, todays
from torchft.data.kept import KeptUnits, counting
from torchft.data.position import DataPlan, DataPosition

AT = DataPosition(1, 2)


def kept(*units: int, step: int = 7, quorum: int = 3, position: DataPosition = AT) -> str:
    return KeptUnits(step, quorum, position, frozenset(units)).text


def counts(*texts: str) -> list[set[int]]:
    return [set(each) for each in counting(texts, step=7, committed_quorum_id=3, position=AT)]


def test_a_text_has_ranges_of_units() -> None:
    assert kept(0, 1, 2, 5, 7, 8) == "7 3 1.2 0-2,5,7-8"
    assert kept(4, quorum=-1) == "7 -1 1.2 4"


@pytest.mark.parametrize("units", [{0}, {0, 1}, {3, 5, 6, 7, 40}, set(range(5000))])
def test_a_text_is_read_back(units: set[int]) -> None:
    found = KeptUnits(12, -1, DataPosition(0, 9), frozenset(units))
    assert KeptUnits.parse(found.text) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7 3 1.2 ",
        "7 3 1.2",
        "7 3 1.2 0-",
        "7 3 1.2 a",
        "7 3 12 0",
        "7 3 1.2 0-99999999999",
        "\u0667 3 1.2 0",
    ],
)
def test_a_malformed_text_says_nothing(text: str) -> None:
    assert KeptUnits.parse(text) is None
    assert counts(text, kept(1)) == [set(), {1}]


def test_units_of_other_weights_or_of_another_batch_do_not_count() -> None:
    assert counts(kept(0), kept(1, step=6), kept(2, quorum=2), kept(3, position=DataPosition(1, 1)), "") == [
        {0},
        set(),
        set(),
        set(),
        set(),
    ]


def test_a_unit_that_two_groups_keep_counts_once() -> None:
    assert counts(kept(0, 1), kept(1, 2), kept(2, 3)) == [{0, 1}, set(), {2, 3}]


def test_random_failures_of_one_step() -> None:
    """An oracle of sets: whichever groups meet, keep and forget, the sum of a quorum has each sample of the
    batch once.
    """
    again: Counter[int] = Counter()
    for seed in range(first := todays(0), first + often(50_000)):
        again[_one_step(random.Random(seed))] += 1
    assert all(again[attempts] for attempts in range(5))


def _one_step(rng: random.Random) -> int:
    """Plays the attempts at one step. Returns how many continued from an earlier one."""
    plan = DataPlan(rng.randint(1, 12), 12, rng.choice([1, 2]), seed=rng.randrange(9))
    at, ranks = DataPosition(), rng.randint(1, 3)
    keeps: dict[int, frozenset[int]] = dict.fromkeys(range(rng.randint(1, 6)), frozenset())
    sums: dict[int, Counter[int]] = {group: Counter() for group in keeps}  # the samples in the kept gradients
    continued = 0
    while True:
        present = sorted(rng.sample(list(keeps), rng.randint(1, len(keeps))))
        texts = [KeptUnits(7, 3, at, keeps[g]).text if keeps[g] else "" for g in present]
        found = counting(texts, step=7, committed_quorum_id=3, position=at)
        union = frozenset[int]().union(*found)
        continued += bool(union)
        for group, own in zip(present, found):
            if own != keeps[group]:
                keeps[group], sums[group] = frozenset(), Counter()
        total: Counter[int] = Counter()
        sizes = set()
        for rank, group in enumerate(present):
            parts = plan.parts(at, rank, len(present), ranks, union)
            shares = [plan.share(at, rank, len(present), r, ranks, union, keeps[group]) for r in range(ranks)]
            assert len({len(share.units) for share in shares}) == 1, "their collectives would hang"
            assert all(
                share.units[-1].last and not share.units[0].last for share in shares if len(share.units) > 1
            )
            sizes |= {len(part) for part in parts[:1]}
            units = [unit for share in shares for unit in share.units if unit.weight]
            assert sorted(unit.number for unit in units) == sorted(unit for part in parts for unit in part)
            sums[group].update(index for unit in units for index in unit.indices)
            assert sum(share.samples for share in shares) == sum(sums[group].values())
            keeps[group] |= frozenset(unit.number for unit in units)
            total.update(sums[group])
        assert max(sizes) - min(sizes) <= 1, "the missing units are divided evenly"
        assert total == Counter(range(plan.length)), "each sample is in the sum of every quorum once"
        if rng.random() < 0.3:
            return continued
        for group in list(keeps):
            if rng.random() < 0.2 and len(keeps) > 1:
                del keeps[group]  # it has failed
            elif rng.random() < 0.1:
                keeps[group], sums[group] = frozenset(), Counter()
        if rng.random() < 0.3:
            joined = max(keeps) + 1
            keeps[joined], sums[joined] = frozenset(), Counter()
