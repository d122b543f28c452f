"""Which unit of which step is audited, and who is found to be wrong; each faulty group in time, no healthy
one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Optional

import pytest

from tests.bounded import often, todays
from torchft._manager.checks.audit import MOST_TRIES, WORDS, Corruption, Row, chosen, due, judge

EPS = 2.0**-23
BOUND = math.sqrt(EPS)


def row(digest: int, bound: float = 0.0, norm: float = 1.0, kind: int = 7, tries: int = 0) -> Row:
    return Row(kind, tries, digest, bound, (norm, 0.1 * norm, -0.2 * norm, 0.3 * norm, 0.0))


NOTHING = Row(0, 0, 0, 0.0, (0.0,) * 5)


def test_a_row_is_sent_as_integers() -> None:
    sent = Row(2**62 + 1, 2, -5, BOUND, (math.inf, -1.5, 0.0, 1e-300, 3.0))
    assert len(sent.words) == WORDS
    assert Row.of(sent.words) == sent
    assert Row.of([0] * WORDS) == NOTHING


@pytest.mark.parametrize(("rate", "length"), [(1.0, 1), (0.5, 2), (0.3, 4), (0.01, 100), (0.001, 1000)])
def test_one_step_in_each_window_is_audited_at_any_place(rate: float, length: int) -> None:
    windows = 400 if length < 1000 else 100
    audited = [step for step in range(windows * length) if due(step, rate, seed=3)]
    assert [step // length for step in audited] == list(range(windows))
    assert max(b - a for a, b in itertools.pairwise(audited)) <= 2 * length - 1
    places = Counter(step % length * 4 // length for step in audited)  # by quarter
    quarters = {place * 4 // length for place in range(length)}
    assert set(places) == quarters
    assert min(places.values()) > 0.6 * windows / len(quarters)
    if length > 1:
        assert audited != [step for step in range(windows * length) if due(step, rate, seed=4)]


def test_each_group_and_each_unit_is_chosen_equally_often() -> None:
    for among in (1, 2, 3, 7):
        for what in ("group", "unit"):
            times = Counter(chosen(step, among, 3, what) for step in range(7000))
            assert set(times) == set(range(among))
            assert min(times.values()) > 0.85 * 7000 / among
    both = Counter((chosen(step, 2, 3, "group"), chosen(step, 2, 3, "unit")) for step in range(4000))
    assert min(both.values()) > 0.85 * 1000, "the choices are independent of each other"


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        # One group, or none, has computed the unit.
        ([], None),
        ([NOTHING, NOTHING], None),
        ([row(1)], None),
        ([row(1), NOTHING], None),
        # Of three and more, those that differ from more than half are wrong; a group that heals is none.
        ([row(1), row(1), row(1)], None),
        ([row(1), row(2), row(1)], Corruption((1,), True, 0, 1)),
        ([row(2), row(1), row(1)], Corruption((0,), True, 1, 1)),
        ([row(2), NOTHING, row(1), row(1)], Corruption((0,), True, 2, 1)),
        ([row(2), row(1), row(3), row(1), row(1)], Corruption((0, 2), True, 1, 1)),
        # No majority: all are named.
        ([row(1), row(2)], Corruption((0, 1), False, 0, 1)),
        ([row(1), row(2), row(3)], Corruption((0, 1, 2), False, 0, 1)),
        ([row(1), row(1), row(2), row(2)], Corruption((0, 1, 2, 3), False, 0, 1)),
        ([NOTHING, row(1, tries=1), row(2)], Corruption((1, 2), False, 1, 2)),
        # Other kernels, or other parameters, are not compared.
        ([row(1), row(2, kind=8)], None),
        ([row(1), row(2, kind=8), row(1)], None),
        ([row(1), row(2, kind=8), row(1), row(3)], Corruption((3,), True, 0, 1)),
        # Within the bound.
        ([row(1, BOUND), row(2, BOUND, 1 + 0.9 * BOUND)], None),
        ([row(1, BOUND), row(2, BOUND, 1 + 1.1 * BOUND), row(3, BOUND)], Corruption((1,), True, 0, 1)),
        # No group is alone against the others in a chain.
        ([row(1, BOUND), row(2, BOUND, 1 + 0.8 * BOUND), row(3, BOUND, 1 + 1.6 * BOUND)], None),
        # NaN and infinity: alike in all groups, or not.
        ([row(1, BOUND, math.nan), row(2, BOUND, math.inf), row(3, BOUND, math.nan)], None),
        ([row(1, BOUND, math.nan), row(2, BOUND), row(3, BOUND)], Corruption((0,), True, 1, 1)),
        ([row(1, 0.0, math.nan), row(1, 0.0, math.nan)], None),
    ],
)
def test_who_is_wrong(rows: list[Row], found: Optional[Corruption]) -> None:
    assert judge(dict(enumerate(rows))) == found


def test_a_step_without_a_majority_is_made_again_a_few_times() -> None:
    fails = [judge({0: row(1, tries=tries), 1: row(2)}) for tries in range(MOST_TRIES)]
    assert [found.fails for found in fails if found is not None] == [True] * (MOST_TRIES - 1) + [False]
    certain = judge({rank: row(rank == 1, tries=MOST_TRIES) for rank in range(3)})
    assert certain is not None and certain.fails


@pytest.mark.parametrize("rate", [1.0, 0.1, 0.01])
def test_a_group_whose_gradients_are_all_wrong_is_found_within_two_windows(rate: float) -> None:
    rng = random.Random(todays(1))
    for _ in range(100):
        seed, begins, groups = rng.randrange(1000), rng.randrange(10_000), rng.randint(3, 8)
        faulty, step = rng.randrange(groups), begins
        while not due(step, rate, seed):
            step += 1
        found = judge({rank: row(rng.getrandbits(40) if rank == faulty else 1) for rank in range(groups)})
        assert found is not None and found.wrong == (faulty,) and found.certain
        assert step - begins < 2 / rate


@pytest.mark.parametrize("bits", [True, False])
def test_no_healthy_group_is_named(bits: bool) -> None:
    """Without deterministic kernels, gradients differ by rounding: here by up to 64 roundings of the norm."""
    rng, groups, audits, steps = random.Random(todays(2)), 4, 0, often(100_000)
    for step in range(steps):
        if not due(step, 0.1, 5):
            continue
        audits += 1
        norm = 10.0 ** rng.uniform(-6, 6)
        rows = {
            rank: row(step) if bits else row(rank, BOUND, norm * (1 + 64 * EPS * rng.uniform(-1, 1)))
            for rank in range(groups)
        }
        assert judge(rows) is None
    assert audits == steps // 10
