"""Decides which unit of which step all groups compute, and whose gradient of it is wrong. Does not import
torch.

With ``audit=0.01`` one step in each 100 is audited, at a random place among them. In it all participants
compute one unit: a random one of a random group, which computes it anyway. The others read it from their own
dataset, and compute it with their own weights and the random numbers of that unit, so its gradient has the
same bits everywhere. They discard it afterwards. Step, group and unit follow from the number of the step, so
all groups choose alike without a message. Before the vote one small reduction shows all groups the
fingerprints of all (:class:`Row`), and all judge them alike (:func:`judge`).

- Each audit compares a gradient of every group. A group whose gradients are all wrong is found within
  ``2 / rate`` steps, and a step is at most one unit longer, so that the cost is at most ``rate``.
- From three groups on a majority shows at once which group is wrong. It ends, and the others make the step
  again without it.
- Without a majority, as with two groups, all are named and none is excluded. The step is made again, and
  committed after :data:`MOST_TRIES` attempts.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Optional

from torchft._manager.checks.divergence import comparable

PROJECTIONS = 4
MOST_TRIES = 3  # attempts at a step in which groups differ without a majority
WORDS = 5 + PROJECTIONS  # of a row
_NUMBERS, _INTEGERS = f"<3q{WORDS - 3}d", f"<{WORDS}q"


class Row(NamedTuple):
    """A gradient as one group sends it to the others, in :data:`WORDS` integers of 64 bits.

    Attributes:
        kind: identifies what was computed, by which kernels. Only rows of one kind are compared. 0: the group
            has computed nothing, because it heals or is a spare.
        tries: the number of attempts at this step in which groups differed without a majority.
        digest: of the bits of all gradients; with a bound, of the sizes.
        bound: how much equal gradients may differ, relative to their norm; 0: not in a single bit.
        sizes: the norm of the gradients, and their projections to some fixed directions; 0 without a bound.
    """

    kind: int
    tries: int
    digest: int
    bound: float
    sizes: tuple[float, ...]

    @property
    def words(self) -> tuple[int, ...]:
        return struct.unpack(_INTEGERS, struct.pack(_NUMBERS, *self[:4], *self.sizes))

    @classmethod
    def of(cls, words: Sequence[int]) -> Row:
        kind, tries, digest, bound, *sizes = struct.unpack(_NUMBERS, struct.pack(_INTEGERS, *words))
        return cls(kind, tries, digest, bound, tuple(sizes))


class Corruption(NamedTuple):
    """Groups whose gradients of one unit differ.

    Attributes:
        wrong: replica ranks of the groups that differ from more than half of those compared; all that were
            compared if no group agrees with more than half.
        certain: whether more than half agree.
        first: replica rank of the first group that is right; of the first one, if none is known to be.
        tries: the number of attempts at this step with this outcome, this one included.
    """

    wrong: tuple[int, ...]
    certain: bool
    first: int
    tries: int

    @property
    def fails(self) -> bool:
        """Whether the step is made again."""
        return self.certain or self.tries < MOST_TRIES


def due(step: int, rate: float, seed: int) -> bool:
    """Whether a step is audited: one in each ``1 / rate`` steps, rounded up, at a random place.

    Args:
        step: its number.
        rate: above 0 and at most 1.
        seed: equal in all groups.
    """
    length = math.ceil(1 / rate)
    window, place = divmod(step, length)
    return place == chosen(window, length, seed, "step")


def chosen(number: int, among: int, seed: int, what: str) -> int:
    """A random number below ``among``, the same wherever the arguments are the same."""
    text = f"torchft audit 1: {what} {number}, {seed}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % among


def judge(rows: Mapping[int, Row]) -> Optional[Corruption]:
    """Compares the gradients of the groups, by replica rank. None if they are alike, or there are not two."""
    compared = comparable(rows)
    count = Counter(rows[rank] for rank in compared)
    agree = {row: sum(n for other, n in count.items() if _alike(row, other)) for row in count}
    right = [rank for rank in compared if 2 * agree[rows[rank]] > len(compared)]
    wrong = tuple(rank for rank in compared if rank not in right)
    if not wrong:
        return None
    tries = 1 + max(rows[rank].tries for rank in compared)
    return Corruption(wrong, bool(right), (right or wrong)[0], tries)


def _alike(one: Row, other: Row) -> bool:
    if one.digest == other.digest:
        return True
    if not one.bound:
        return False
    norms = one.sizes[0], other.sizes[0]
    if not all(map(math.isfinite, norms)):
        return not any(map(math.isfinite, norms))
    return all(abs(a - b) <= one.bound * max(norms) for a, b in zip(one.sizes, other.sizes))
