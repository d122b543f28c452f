"""How the ranks of a group end a heal in pieces in one step: they tell each other how far they are, by their store.

A group commits a step only if all of its ranks vote for it, so a rank that has all of its pieces trains along until the
others have theirs. What is said here is a hint: it saves transfers that would be in vain. The vote decides.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class Progress(Enum):
    """How far a rank, or a group, is."""

    ARRIVING = "pieces are missing, or not compared"
    READY = "ready"  # all pieces are compared
    WHOLE = "whole"  # the state is transferred as a whole


class Counters(Protocol):
    """A store that all ranks of a group share."""

    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class Ranks:
    """The ranks of a group. One of a single rank needs no store.

    Args:
        store: of the group.
        name: of this incarnation of it.
        group_rank: of this rank.
        group_world_size: ranks of the group.
    """

    def __init__(self, store: Counters, name: str, group_rank: int, group_world_size: int) -> None:
        self._store = store
        self._name = name
        self._group_rank = group_rank
        self._group_world_size = group_world_size
        self._said: set[tuple[int, Progress]] = set()

    def say(self, step: int, progress: Progress) -> None:
        """This rank is so far, before it votes on a step. Said twice of one step, it counts once."""
        if self._group_world_size == 1 or progress is Progress.ARRIVING or (step, progress) in self._said:
            return
        self._said = {said for said in self._said if said[0] == step} | {(step, progress)}
        self._store.add(self._key(step, progress), 1)

    def heard(self, step: int) -> Progress:
        """How far the group is when a step begins. What was said before the votes on the step before is known to all
        ranks now, so all come to the same.
        """
        if self._group_world_size == 1:
            return Progress.READY
        whole = self._store.add(self._key(step - 1, Progress.WHOLE), 0)
        whole += self._store.add(self._key(step, Progress.WHOLE), 0)  # in an earlier attempt
        ready = self._store.add(self._key(step - 1, Progress.READY), 0)
        if self._group_rank == 0:  # no rank asks for those of earlier steps
            for progress in (Progress.WHOLE, Progress.READY):
                self._store.delete_key(self._key(step - 3, progress))
        if whole:
            return Progress.WHOLE
        return Progress.READY if ready == self._group_world_size else Progress.ARRIVING

    def _key(self, step: int, progress: Progress) -> str:
        return f"torchft/heal/{self._name}/{step}/{progress.value}"
