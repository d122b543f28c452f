"""A stream of packed sequences: the tokens of documents, joined and cut into sequences of one length."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Optional

from torch.utils.data import IterableDataset


class Packed(IterableDataset[tuple[int, ...]]):
    """Its shards are documents, in another order in each epoch. All tokens of all documents have numbers.

    Args:
        lengths: tokens of each document.
        size: tokens of a sequence. The last one of a shard may have fewer, and -1 in place of the others.
        documents: those of this shard; default: all.
    """

    def __init__(self, lengths: list[int], size: int, documents: Optional[Sequence[int]] = None) -> None:
        self.lengths, self.size, self.epoch = lengths, size, 0
        self.documents = range(len(lengths)) if documents is None else documents
        self.num_shards = len(lengths)
        # The next document, and the tokens of those before it that are in no sequence yet: as they are, and
        # where the next iterator begins.
        self.now: tuple[int, list[int]] = (0, [])
        self.begin: Optional[tuple[int, list[int]]] = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Packed:
        return type(self)(self.lengths, self.size, self.documents[index::num_shards])

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        (begin, rest), self.begin = self.begin or (0, []), None
        order, ends = list(self.documents), list(accumulate(self.lengths))
        random.Random(self.epoch).shuffle(order)
        place = begin
        while len(rest) >= self.size or place < len(order):
            if len(rest) < self.size:
                document, place = order[place], place + 1
                rest = [*rest, *range(ends[document] - self.lengths[document], ends[document])]
                continue
            sequence, rest = rest[: self.size], rest[self.size :]
            self.now = place, rest
            yield tuple(sequence)
        if rest:
            self.now = len(order), []
            yield (*rest, *[-1] * (self.size - len(rest)))


class Resuming(Packed):
    """Has a state, in which the tokens between two sequences are."""

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["now"]


def tokens(sequences: Iterable[tuple[int, ...]]) -> Counter[int]:
    """How often each token is in these sequences."""
    return Counter(token for sequence in sequences for token in sequence if token >= 0)
