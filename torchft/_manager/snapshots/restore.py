"""How the ranks of a group choose the copy that they begin with. They agree through their store.

All ranks compute the choice from the same values. Each verifies its own copy before any of them loads; if one
is damaged or does not fit, all choose again without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Optional, Protocol

from torchft.checkpointing.snapshots.choice import Copy, newest
from torchft.checkpointing.snapshots.slots import Slot, SlotError


class Reachable(NamedTuple):
    """A copy that this rank can load.

    Attributes:
        step, quorum: of the copy.
        where: names its place.
        open: reads and verifies it, into memory of this process.
    """

    step: int
    quorum: int
    where: str
    open: Callable[[], Slot]


class Store(Protocol):
    """The methods of a PyTorch store that are used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class Ranks:
    """The ranks of a group, as one of them sees them. A group of a single rank does not use the store.

    Args:
        store: the store of the group.
        name: the replica id of this incarnation of the group.
        group_rank, group_world_size: of this rank.
        timeout: of a wait for the other ranks.
    """

    def __init__(
        self, store: Store, name: str, group_rank: int, group_world_size: int, timeout: timedelta
    ) -> None:
        self._store = store
        self._name = name
        self._timeout = timeout
        self._number = 0  # of exchanges
        self.group_rank = group_rank
        self.group_world_size = group_world_size

    def exchange(self, value: str) -> list[str]:
        """Returns the values of all ranks.

        Raises:
            RuntimeError: a rank gave none in time.
        """
        if self.group_world_size == 1:
            return [value]
        self._number += 1
        keys = [
            f"torchft/restore/{self._name}/{self._number}/{rank}" for rank in range(self.group_world_size)
        ]
        self._store.set(keys[self.group_rank], value)
        self._store.wait(keys, self._timeout)
        return [each.decode() for each in self._store.multi_get(keys)]


def choose(
    ranks: Ranks,
    reach: Sequence[Reachable],
    refuses: Callable[[Slot], Optional[str]],
    say: Callable[[str], None],
) -> Optional[Slot]:
    """Returns this rank's copy of the newest step that all ranks can load; None if there is none. All ranks
    of the group call it.

    Args:
        ranks: the ranks of the group.
        reach: what this rank can load; of several copies of a step the first is preferred.
        refuses: returns why this rank does not load a copy; None: it does.
        say: called with the reason for each copy that this rank does not load.

    Raises:
        RuntimeError: another rank did not answer in time.
    """
    left = list(reach)
    while True:
        told = json.dumps([[one.step, one.quorum] for one in left])
        lists = [json.loads(each) for each in ranks.exchange(told)]
        choice = newest(
            [[Copy(step, quorum, str(i)) for i, (step, quorum) in enumerate(one)] for one in lists]
        )
        if choice is None:
            return None
        mine = left[int(choice.places[ranks.group_rank])]
        slot = why = None
        try:
            slot = mine.open()
            why = refuses(slot)
        except SlotError as error:
            why = str(error)
        if why is not None:
            say(f"the copy of step {mine.step} in {mine.where} is not loaded: {why}")
            left.remove(mine)
        if not any(ranks.exchange("" if why is None else "refused")):
            return slot
