"""Which group keeps which part of a state."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from tests.bounded import often, todays
from torchft.checkpointing.snapshots.shares import SMALL, WHOLE, Share, deal, missing

BIG = SMALL + 1


@pytest.mark.parametrize(
    ("sizes", "parts", "dealt"),
    [
        ([], 3, ()),
        ([0, SMALL], 3, (None, None)),
        ([BIG, BIG, BIG, BIG], 3, (0, 1, 2, 0)),
        # the largest has a part of its own
        ([4 * BIG, BIG, 8, BIG, BIG], 2, (0, 1, None, 1, 1)),
        ([BIG, BIG], 1, (0, 0)),
    ],
)
def test_the_part_of_each_region(sizes: list[int], parts: int, dealt: tuple[int | None, ...]) -> None:
    assert deal(sizes, parts) == dealt


@pytest.mark.parametrize(
    ("shares", "lacks"),
    [
        ([WHOLE], ()),
        ([Share(1, 3, 3)], ()),
        ([Share(0, 3, 1), WHOLE], ()),
        ([Share(0, 3, 2)], (2,)),
        ([Share(2, 3, 2)], (1,)),
        ([Share(0, 3, 2), Share(1, 3, 2)], ()),
        ([Share(0, 4, 2), Share(1, 4, 2)], (3,)),
        ([Share(0, 4, 2), Share(2, 4, 2)], ()),
        ([Share(1, 4, 1), Share(1, 4, 1)], (0, 2, 3)),
    ],
)
def test_what_no_copy_has(shares: list[Share], lacks: tuple[int, ...]) -> None:
    assert missing(shares) == lacks


def test_a_group_keeps_all_where_there_are_few() -> None:
    assert Share.of(1, 3, 2) == Share(1, 3, 2) and not Share(1, 3, 2).whole
    for share in (Share.of(1, 2, 2), Share.of(0, 1, 2), Share.of(1, 3, 0), Share.of(1, 3, 5)):
        assert share.whole and all(share.has(part) for part in range(share.parts))


def test_what_is_no_tensor_is_in_all_groups() -> None:
    assert deal([BIG, BIG, BIG], 3, frozenset([1])) == (0, None, 1)


def test_any_loss_of_fewer_groups_than_copies_leaves_each_region_and_memory_is_shared_evenly() -> None:
    draw = random.Random(todays(46))
    for _ in range(often(200)):
        parts = draw.randint(3, 6)
        copies = draw.randint(2, parts - 1)
        sizes = [draw.choice([8, draw.randint(BIG, 50 * BIG)]) for _ in range(draw.randint(0, 40))]
        shares = [Share(part, parts, copies) for part in range(parts)]
        dealt = deal(sizes, parts)
        kept = [sum(size for size, part in zip(sizes, dealt) if share.has(part)) for share in shares]
        large = [size for size in sizes if size > SMALL]
        assert max(kept) - min(kept) <= copies * max(large, default=0)
        for lost in combinations(shares, copies - 1):
            left = [share for share in shares if share not in lost]
            assert missing(left) == ()
            assert all(any(share.has(part) for share in left) for part in dealt)
