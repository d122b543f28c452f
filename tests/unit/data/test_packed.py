"""Jobs that train on packed sequences of tokens: each token once an epoch."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.bounded import often, todays
from tests.unit.data.packed import Packed, Resuming, tokens
from tests.unit.data.streaming import train


@pytest.mark.parametrize("kind", [Packed, Resuming])
def test_sequences_go_over_the_ends_of_documents(kind: type[Packed]) -> None:
    data = kind([3, 0, 6, 1], 4)
    sequences = list(data)
    assert [len(sequence) for sequence in sequences] == 3 * [4]
    assert tokens(sequences) == Counter(range(10)) and sequences[-1].count(-1) == 2
    assert len({tuple(Packed([3, 0, 6, 1], 4, [d])) for d in range(4)}) == 4


@pytest.mark.parametrize("kind", [Packed, Resuming])
def test_each_token_once(kind: type[Packed]) -> None:
    """Random histories: groups fail, join and lose steps, with 8, 4, 2, 1 and 4 groups."""
    first = todays(0)
    for seed in range(first, first + often(200)):
        rng = random.Random(seed)
        data = kind([rng.randint(0, 20) for _ in range(rng.randint(1, 20))] + [1], rng.randint(1, 7))
        _, by_epoch, _ = train(seed, dataset=data)
        for seen in by_epoch:
            assert tokens(seen.elements()) == Counter(range(sum(data.lengths))), f"seed {seed}"
