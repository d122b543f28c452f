"""Lets all ranks of a group end their heal in the same step. They agree through the store that they share.

A group commits a step only if all of its ranks vote for it. In a heal in passing, a rank that has all of its
parts therefore trains along until the other ranks have theirs. Its reports only avoid useless transfers.

No rank loads a state before all ranks have received theirs. If their only source fails meanwhile, a rank that
has loaded would be of another step than the others, and no group would be left that they could heal from.
"""

from __future__ import annotations

import time
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store

# The first and the longest pause between two looks at a decision.
_PAUSE_SEC = 0.001, 0.02
# The values of a decision.
_LOAD, _DISCARD = b"load", b"discard"


class Progress(Enum):
    """The progress of a rank's heal, or of a group's."""

    ARRIVING = "parts are missing, or not compared"
    READY = "ready"  # all parts are compared
    WHOLE = "whole"  # the state is transferred at once


class GroupRanks(NamedTuple):
    """The ranks of a group, as one of them sees them."""

    store: Store  # which they share
    name: str  # the replica id of this incarnation of the group
    number: int  # of this rank
    size: int  # the number of ranks


class HealingRanks:
    """The progress of the ranks of a group. A group of a single rank does not use the store."""

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks

    def report(self, step: int, progress: Progress) -> None:
        """Reports that this rank is READY, or needs the WHOLE state, before its vote on a step. A repeated
        call changes nothing.
        """
        ranks = self._ranks
        if ranks.size > 1:
            whole = progress is Progress.WHOLE
            ranks.store.set(self._whole(step) if whole else self._ready(step, ranks.number), "")

    def group_progress(self, step: int) -> Progress:
        """The group's progress at the beginning of a step.

        It depends only on the reports before the votes on the previous step. All of these have been made by
        now, so all ranks return the same value.
        """
        store, _, number, size = self._ranks
        if size == 1:
            return Progress.READY
        # An earlier attempt at this step may have reported WHOLE for it.
        whole = any(store.check([self._whole(one)]) for one in (step - 1, step))
        ready = store.check([self._ready(step - 1, rank) for rank in range(size)])
        # No rank reads so old a report any more.
        store.delete_key(self._ready(step - 3, number))
        if number == 0:
            store.delete_key(self._whole(step - 3))
        if whole:
            return Progress.WHOLE
        return Progress.READY if ready else Progress.ARRIVING

    def _ready(self, step: int, rank: int) -> str:
        return f"torchft/heal/{self._ranks.name}/{step}/ready/{rank}"

    def _whole(self, step: int) -> str:
        return f"torchft/heal/{self._ranks.name}/{step}/whole"


class Agreement:
    """The decision of a group whether its ranks load the states that they have received in a heal, or discard
    them.

    The first rank that cannot load decides that none does. A group of a single rank does not use the store.
    """

    def __init__(self, ranks: GroupRanks) -> None:
        self._ranks = ranks
        self._key = ""  # of the present heal; empty: none, or a single rank
        # Quorum id and step of the latest heal, and how many heals with these came before.
        self._attempt = (-1, -1, 0)

    def begin(self, quorum_id: int, step: int) -> None:
        """Begins a heal. All ranks have ended the one before: each has asked for this quorum. A script may
        have begun the step again.

        At step 0 a rank heals from the group that is the first for this rank, so others of its group do not
        heal. No rank can be of another step there, and each loads its state alone.
        """
        old, self._key = self._key, ""
        *last, attempt = self._attempt
        self._attempt = quorum_id, step, attempt + 1 if last == [quorum_id, step] else 0
        if self._ranks.size > 1 and step > 0:
            self._key = f"torchft/load/{self._ranks.name}/{quorum_id}/{step}/{self._attempt[-1]}"
        if old and old != self._key:
            for key in (old, self._received(old)):
                self._ranks.store.delete_key(key)

    @property
    def needed(self) -> bool:
        """Whether the ranks of the group have to agree in the present heal."""
        return bool(self._key)

    def refuse(self) -> bool:
        """For a rank that has not received its state. False if all ranks load theirs, this one too."""
        return not self.needed or self._decide(_DISCARD) == _DISCARD

    def reached(self, timeout: timedelta) -> bool:
        """For a rank that has received its state. Waits for the others, and returns whether it loads the
        state.

        After the timeout, all ranks discard their states.
        """
        if not self.needed:
            return True
        if self._ranks.store.add(self._received(self._key), 1) == self._ranks.size:
            return self._decide(_LOAD) == _LOAD
        end = time.monotonic() + timeout.total_seconds()
        pause, longest = _PAUSE_SEC
        while not self._ranks.store.check([self._key]) and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return not self.refuse()

    def _decide(self, decision: bytes) -> bytes:
        """Returns the decision of the group: the first one that a rank has made."""
        return self._ranks.store.compare_set(self._key, "", decision.decode())

    def _received(self, key: str) -> str:
        return f"{key}/received"
