"""The units whose gradients groups keep of a step that was not committed: what a group announces of them, and
which of them count in the next quorum. Pure, and free of torch.

A group that has computed its units keeps the sum of their gradients if a peer fails. In its next quorum
request it announces the units (:class:`KeptUnits`), so the groups of that quorum compute only the others.
Each group decides by itself, from the same announcements (:func:`counting`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Optional

from torchft.data.position import DataPosition

_TEXT = re.compile(r"(\d+) (-?\d+) (\d+)\.(\d+) (\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)", re.ASCII)
_MOST_UNITS = 1 << 24  # a text with more is malformed


class KeptUnits(NamedTuple):
    """The units that a group keeps, all its ranks together, and the weights of which they are gradients.

    Attributes:
        step: the Manager's step.
        committed_quorum_id: quorum in which the weights of that step were committed.
        position: position of the batch.
        units: numbers of the units in the batch.
    """

    step: int
    committed_quorum_id: int
    position: DataPosition
    units: frozenset[int]

    @property
    def text(self) -> str:
        """As it is announced; its length grows with the gaps between the units."""
        position, units = self.position, ",".join(_ranges(self.units))
        return f"{self.step} {self.committed_quorum_id} {position.epoch}.{position.batch} {units}"

    @classmethod
    def parse(cls, text: str) -> Optional[KeptUnits]:
        """Reads :attr:`text`; None if it is empty or malformed."""
        found = _TEXT.fullmatch(text)
        if found is None:
            return None
        *numbers, ranges = found.groups()
        step, quorum_id, epoch, batch = map(int, numbers)
        units: set[int] = set()
        for ends in ranges.split(","):
            first, _, last = ends.partition("-")
            numbered = range(int(first), int(last or first) + 1)
            if numbered.stop > _MOST_UNITS:
                return None
            units.update(numbered)
        return cls(step, quorum_id, DataPosition(epoch, batch), frozenset(units))


def counting(
    texts: Sequence[str], *, step: int, committed_quorum_id: int, position: DataPosition
) -> list[frozenset[int]]:
    """Returns the units that each group of a quorum keeps, in the order of the groups. The same in all groups
    of a quorum that are at one position.

    Units do not count if they are gradients of other weights, or of another batch. Two groups keep the same
    unit if one of them was not in the quorum in which the other computed it. Then only the first group
    counts, as the unit would be in both of their sums.

    Args:
        texts: what each group announces; empty: nothing.
        step, committed_quorum_id: of the newest weights in the quorum.
        position: position of the step, after a heal.
    """
    found: list[frozenset[int]] = []
    taken: set[int] = set()
    for kept in map(KeptUnits.parse, texts):
        counts = (
            kept is not None
            and kept[:3] == (step, committed_quorum_id, position)
            and taken.isdisjoint(kept.units)
        )
        found.append(kept.units if kept is not None and counts else frozenset())
        taken |= found[-1]
    return found


def _ranges(units: Iterable[int]) -> Iterator[str]:
    for _, run in itertools.groupby(enumerate(sorted(units)), lambda pair: pair[1] - pair[0]):
        first, *more = (unit for _, unit in run)
        yield f"{first}-{more[-1]}" if more else str(first)
