"""Which group keeps which part of a state. Pure code.

The groups that commit a step have equal states. Each region of the state (a tensor's memory) is of one part;
there are as many parts as groups. A group keeps its own part and those that follow, so that each part is in
the memory of several groups' hosts; or of all of them, if each group keeps the whole state. Small regions,
most of which are not weights, are in all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import FrozenSet, List, NamedTuple, Optional, Tuple

SMALL = 64 << 10  # bytes; a region of at most this size is kept by all groups


class Share(NamedTuple):
    """The parts of a state that a group keeps.

    Attributes:
        part: the first of its parts: its number among the groups that committed the step.
        parts: the number of these groups.
        copies: groups that keep each part.
    """

    part: int
    parts: int
    copies: int

    @classmethod
    def of(cls, part: int, parts: int, copies: int) -> Share:
        """Returns what a group keeps if ``copies`` groups keep each part, 0: all."""
        return cls(part, parts, copies if 0 < copies < parts else parts)

    @property
    def whole(self) -> bool:
        """Whether it is the whole state."""
        return self.copies >= self.parts

    def has(self, part: Optional[int]) -> bool:
        """Whether the group keeps a part; None: what all groups keep."""
        return part is None or (part - self.part) % self.parts < self.copies


WHOLE = Share(0, 1, 1)


def deal(sizes: Sequence[int], parts: int, common: FrozenSet[int] = frozenset()) -> Tuple[Optional[int], ...]:
    """Returns the part of each region, None for what all groups keep: the same in all groups, and parts of
    about the same size.

    Args:
        sizes: of the regions, in bytes.
        parts: the number of parts.
        common: the numbers of regions that all groups keep, whatever their size.
    """
    return _dealt(tuple(sizes), parts, common)


@lru_cache(maxsize=4)  # the same for each copy
def _dealt(sizes: Tuple[int, ...], parts: int, common: FrozenSet[int]) -> Tuple[Optional[int], ...]:
    loads = [0] * parts
    dealt: List[Optional[int]] = []
    for number, size in enumerate(sizes):
        if size <= SMALL or number in common:
            dealt.append(None)
            continue
        part = min(range(parts), key=loads.__getitem__)
        loads[part] += size
        dealt.append(part)
    return tuple(dealt)


def missing(shares: Collection[Share]) -> Tuple[int, ...]:
    """Returns the parts of a state that none of its copies has; none is missing if it can be restored.
    `shares`: what each copy has, of at least one.
    """
    if any(share.whole for share in shares):
        return ()
    parts = range(next(iter(shares)).parts)
    return tuple(part for part in parts if not any(share.has(part) for share in shares))
