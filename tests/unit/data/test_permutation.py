from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter

import pytest

from torchft.data.permutation import Permutation


def order(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    permutation = Permutation(length, seed, epoch)
    return [permutation[place] for place in range(length)]


def test_each_index_once() -> None:
    for length in [*range(1, 150), 997, 1000, 1024, 1025]:
        assert sorted(order(length, seed=length, epoch=3)) == list(range(length)), length


@pytest.mark.parametrize("length", [10**9 + 7, 2**40, 2**63 - 1])
def test_a_part_of_a_large_dataset(length: int) -> None:
    permutation = Permutation(length, 0, 0)
    places = [*range(200), *range(length - 200, length)]
    indices = [permutation[place] for place in places]
    assert len(set(indices)) == 400
    assert all(0 <= index < length for index in indices)
    assert max(indices) > length * 0.9 > length * 0.1 > min(indices)


def test_the_order_is_the_same_for_ever() -> None:
    """A saved position must identify the same samples in later versions. A new order would need a new format
    of positions.
    """
    assert order(10) == [0, 9, 6, 1, 7, 8, 2, 3, 5, 4]
    assert order(16) == [4, 15, 12, 0, 5, 10, 11, 14, 7, 6, 2, 3, 1, 9, 13, 8]
    text = repr([order(1000, seed=7, epoch=2), Permutation(2**63 - 1, 2**63 - 1, 5)[12345]])
    assert (
        hashlib.sha256(text.encode()).hexdigest()
        == "ad457f1f331e74b70a69415dcdc3f34ead04dcb5c2d59af87545ee874f79bfda"
    )


def test_seeds_epochs_and_lengths_have_different_orders() -> None:
    """With the sum of seed and epoch, as in PyTorch's sampler, (0, 1) and (1, 0) would be the same."""
    orders = {tuple(order(100, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert order(101)[:100] != order(100)


def test_all_orders_of_five_are_equally_frequent() -> None:
    """Pearson's test: with 119 degrees of freedom, a random sum exceeds 176 once in 2,000 times."""
    seeds = 6000
    counts = Counter(tuple(order(5, seed)) for seed in range(seeds))
    expected = seeds / math.factorial(5)
    assert len(counts) == 120
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 176


def test_each_index_comes_up_alike_at_each_place_and_after_each_other() -> None:
    """With 81 and 89 degrees of freedom, random sums exceed 129 and 139 once in 2,000 times."""
    length, seeds = 10, 3000
    orders = [order(length, seed=1, epoch=epoch) for epoch in range(seeds)]
    places = Counter((place, index) for one in orders for place, index in enumerate(one))
    pairs = Counter(pair for one in orders for pair in itertools.pairwise(one))
    assert len(places) == 100 and len(pairs) == 90
    assert sum((count - seeds / 10) ** 2 / (seeds / 10) for count in places.values()) < 129
    assert sum((count - seeds / 10) ** 2 / (seeds / 10) for count in pairs.values()) < 139


@pytest.mark.parametrize("place", [-1, 5])
def test_a_place_out_of_range(place: int) -> None:
    with pytest.raises(IndexError, match=f"place is {place}: allowed are 0 to 4"):
        Permutation(5, 0, 0)[place]
