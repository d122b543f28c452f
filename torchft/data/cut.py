"""How many units of a batch each group computes: as many as fit its speed. Pure, and free of torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


@lru_cache(maxsize=256)
def bounds(units: int, speeds: Sequence[int]) -> tuple[int, ...]:
    """Cuts units into contiguous parts, one for each group, so that the last group ends as early as whole
    units allow: the largest quotient of a part and its speed is the least one. That is the method of D'Hondt,
    with one unit for each group in advance, because a group without one computes a copy of another.

    The same numbers give the same parts on all hosts. If the speeds are equal, or there is at most one unit
    for each group, the sizes differ by at most one.

    Args:
        units: number of units.
        speeds: one for each group, at least 1: only their ratios count. A tuple.

    Returns:
        The first unit of each part, and ``units`` at the end.
    """
    groups = len(speeds)
    if units <= groups or len(set(speeds)) == 1:
        return tuple(units * group // groups for group in range(groups + 1))
    total = sum(speeds)
    # The largest group by group that the method exceeds in any case, so that few units are left to deal out.
    sizes = [max(1, (units - groups) * speed // total) for speed in speeds]
    heap = [((size + 1) / speed, group) for group, (size, speed) in enumerate(zip(sizes, speeds))]
    heapq.heapify(heap)
    for _ in range(units - sum(sizes)):
        group = heap[0][1]
        sizes[group] += 1
        heapq.heapreplace(heap, ((sizes[group] + 1) / speeds[group], group))
    return tuple(accumulate(sizes, initial=0))
