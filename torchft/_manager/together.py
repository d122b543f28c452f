"""How the ranks of a group end a heal in pieces in one step: each rank reports how far it is, by their store.

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


class Keys(Protocol):
    """A store that all ranks of a group share."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class Ranks:
    """The ranks of a group. One of a single rank needs no store.

    Args:
        store: of the group.
        name: of this incarnation of it.
        group_rank: of this rank.
        group_world_size: ranks of the group.
    """

    def __init__(self, store: Keys, name: str, group_rank: int, group_world_size: int) -> None:
        self._store = store
        self._name = name
        self._group_rank = group_rank
        self._group_world_size = group_world_size

    def say(self, step: int, progress: Progress) -> None:
        """This rank is so far, before it votes on a step. To say it again changes nothing."""
        if self._group_world_size == 1 or progress is Progress.ARRIVING:
            return
        self._store.set(self._whole(step) if progress is Progress.WHOLE else self._ready(step, self._group_rank), "")

    def heard(self, step: int) -> Progress:
        """How far the group is when a step begins. What was said before the votes on the step before is known to all
        ranks now, so all come to the same.
        """
        if self._group_world_size == 1:
            return Progress.READY
        # That of this step was said in an earlier attempt.
        whole = any(self._store.check([self._whole(one)]) for one in (step - 1, step))
        ready = self._store.check([self._ready(step - 1, rank) for rank in range(self._group_world_size)])
        self._store.delete_key(self._ready(step - 3, self._group_rank))  # no rank asks for those of earlier steps
        if self._group_rank == 0:
            self._store.delete_key(self._whole(step - 3))
        if whole:
            return Progress.WHOLE
        return Progress.READY if ready else Progress.ARRIVING

    def _ready(self, step: int, rank: int) -> str:
        return f"torchft/heal/{self._name}/{step}/ready/{rank}"

    def _whole(self, step: int) -> str:
        return f"torchft/heal/{self._name}/{step}/whole"
