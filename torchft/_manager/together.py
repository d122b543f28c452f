"""Lets all ranks of a group end their heal in pieces in the same step. They report their progress through a store.

A group commits a step only if all of its ranks vote for it. A rank that has all of its pieces therefore trains along
until the other ranks have theirs. The reports only avoid useless transfers; the vote decides whether the step counts.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class Progress(Enum):
    """The progress of a rank's heal, or of a group's."""

    ARRIVING = "pieces are missing, or not compared"
    READY = "ready"  # all pieces are compared
    WHOLE = "whole"  # the state is transferred as a whole


class Keys(Protocol):
    """The methods of a PyTorch store that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class Ranks:
    """The ranks of a group, as one of them sees them. A group of a single rank does not use the store.

    Args:
        store: the store that all ranks of the group share.
        name: the replica id of this incarnation of the group.
        group_rank: the rank of this process within its group.
        group_world_size: the number of ranks in the group.
    """

    def __init__(self, store: Keys, name: str, group_rank: int, group_world_size: int) -> None:
        self._store = store
        self._name = name
        self._group_rank = group_rank
        self._group_world_size = group_world_size

    def report(self, step: int, progress: Progress) -> None:
        """Reports this rank's progress, before its vote on a step. A repeated call changes nothing."""
        if self._group_world_size == 1 or progress is Progress.ARRIVING:
            return
        self._store.set(self._whole(step) if progress is Progress.WHOLE else self._ready(step, self._group_rank), "")

    def group_progress(self, step: int) -> Progress:
        """The group's progress at the beginning of a step.

        It depends only on the reports before the votes on the previous step. All of these have been made by now, so all
        ranks return the same value.
        """
        if self._group_world_size == 1:
            return Progress.READY
        # An earlier attempt at this step may have reported WHOLE for it.
        whole = any(self._store.check([self._whole(one)]) for one in (step - 1, step))
        ready = self._store.check([self._ready(step - 1, rank) for rank in range(self._group_world_size)])
        self._store.delete_key(self._ready(step - 3, self._group_rank))  # no rank reads so old a report any more
        if self._group_rank == 0:
            self._store.delete_key(self._whole(step - 3))
        if whole:
            return Progress.WHOLE
        return Progress.READY if ready else Progress.ARRIVING

    def _ready(self, step: int, rank: int) -> str:
        return f"torchft/heal/{self._name}/{step}/ready/{rank}"

    def _whole(self, step: int) -> str:
        return f"torchft/heal/{self._name}/{step}/whole"
