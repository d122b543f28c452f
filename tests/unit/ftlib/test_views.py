"""Ranks, meeting places and the state that counts: tables, and random lists compared with slow and obvious
rules.
"""

from __future__ import annotations

import random

import pytest

from tests.bounded import often, todays
from torchft.ftlib.views import Identity, Member, MemberProgress, RankAssignScheme, View, source

A, A2, B, C = Identity("a", 1), Identity("a", 2), Identity("b", 1), Identity("c", 1)


@pytest.mark.parametrize(
    ("members", "identity", "expected"),
    [
        ([A], A, (0, 1)),
        ([B, A], A, (0, 2)),
        ([C, A, B], C, (2, 3)),
        ([A, B, A2], A2, (0, 2)),  # the latest incarnation of a name counts
        ([A, B, A2], B, (1, 2)),
    ],
)
def test_rank_and_size(members: list[Identity], identity: Identity, expected: tuple[int, int]) -> None:
    assert RankAssignScheme.get_rank_rand_size(members, identity) == expected
    assert RankAssignScheme.get_rank_and_size(members, identity) == expected


@pytest.mark.parametrize(
    ("members", "identity", "message"),
    [
        ([], A, "is no member"),
        ([B], A, "allowed: .*'b'"),
        ([A, A2], A, "a later incarnation, 2, has replaced it"),
    ],
)
def test_no_member(members: list[Identity], identity: Identity, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankAssignScheme.get_rank_rand_size(members, identity)


def test_random_lists_of_members() -> None:
    """After joins, restarts and failures each live member computes its own rank, from a list in another
    order.
    """
    rng = random.Random(todays(23))
    for _ in range(often(20_000)):
        listed = {Identity(rng.choice("abcde"), rng.randrange(4)) for _ in range(rng.randrange(1, 8))}
        alive = [
            one
            for one in listed
            if all(o.name != one.name or o.incarnation <= one.incarnation for o in listed)
        ]
        ranks = {}
        for one in alive:
            order = rng.sample(sorted(listed), len(listed))
            ranks[one], size = RankAssignScheme.get_rank_rand_size(order, one)
            assert size == len({o.name for o in listed})
        assert sorted(ranks.values()) == list(range(len(alive)))
        assert [one.name for one in sorted(ranks, key=ranks.__getitem__)] == sorted(one.name for one in alive)
        for one in listed - set(alive):
            with pytest.raises(ValueError, match="later incarnation"):
                RankAssignScheme.get_rank_rand_size(listed, one)


def test_the_meeting_place_is_that_of_rank_0_and_of_this_view_alone() -> None:
    members = (Member(B, "hostb:2"), Member(A, "hosta:1"))
    view = View(7, members)
    assert view.address.startswith("hosta:1/ftlib/7-")
    assert view.address == View(7, members[::-1]).address
    assert view.address != View(8, members).address
    assert view.digest != View(7, (Member(B, "hostb:2"), Member(A2, "hosta:1"))).digest


@pytest.mark.parametrize(
    ("progress", "root", "behind"),
    [
        ([(-1, 0), (-1, 0)], 0, [1]),  # initial weights may differ
        ([(-1, 0), (3, 5)], 1, [0]),
        ([(3, 5), (3, 5)], 0, []),
        ([(3, 5), (3, 6)], 1, [0]),  # rank 1 alone saw the last average
        ([(3, 6), (4, 6)], 1, [0]),  # rank 0 made its step 6 in a view that the others had left
        ([(3, 7), (4, 6)], 1, [0]),
        ([(3, 5), (4, 6), (4, 6), (-1, 0)], 1, [0, 3]),
        ([(-2, 5), (-1, 0)], 1, [0]),  # initial weights are better than a mixture
    ],
)
def test_whose_state_counts(progress: list[tuple[int, int]], root: int, behind: list[int]) -> None:
    assert source([MemberProgress(*each) for each in progress]) == (root, behind)
