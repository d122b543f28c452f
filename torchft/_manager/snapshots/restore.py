"""How the ranks of a group choose the copy that they can begin with. They agree through their store.

All ranks of a group restore the same step of the same history. After a failure of all groups two groups can
have committed the same step in different quorums, with different weights: the quorum tells these apart.

All ranks compute the choice from the same values. The group announces its step with its first request for a
quorum, and reads the copy only if no other group has a newer state: so its bytes are verified when they are
loaded, and before that only whether its structure fits. If the copy of one rank is damaged then, none is
loaded, and all ranks choose again without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Optional

from torchft.checkpointing.snapshots.reading import Slot
from torchft.checkpointing.snapshots.slots import SlotError

if TYPE_CHECKING:
    from torch.distributed import Store


class Reachable(NamedTuple):
    """A copy that this rank can load.

    Attributes:
        step, quorum: of the copy; -1: the quorum in which the step was committed is not known.
        where: names its places.
        misfit: returns why it does not fit this rank, as far as that is known without its tensors.
        open: reads and verifies it, into memory of this process; calls its argument as it gets on.
        saved: when it was completed, in seconds since 1970.
    """

    step: int
    quorum: int
    where: str
    misfit: Callable[[], Optional[str]]
    open: Callable[[Callable[[], None]], Slot]
    saved: float = 0.0


def given_up(copies: Sequence[Reachable]) -> list[tuple[Reachable, Reachable]]:
    """Returns the copies of states that the job has given up, each with one that shows it: the job went on
    from an earlier step, in a later quorum and later. Ids of quorums may begin anew with another lighthouse,
    so they alone do not tell.
    """
    shown = []
    for one in copies:
        later = [
            other
            for other in copies
            if other.quorum > one.quorum and other.step < one.step and other.saved > one.saved
        ]
        shown += [(one, later[-1])] if later else []
    return shown


class Ranks:
    """The ranks of a group, as one of them sees them. A group of a single rank does not use the store.

    Args:
        store: the store of the group.
        name: the replica id of this incarnation of the group.
        group_rank, group_world_size: of this rank.
        timeout: of a wait for the other ranks, since one of them has got on.
    """

    def __init__(
        self, store: Store, name: str, group_rank: int, group_world_size: int, timeout: timedelta
    ) -> None:
        self._store = store
        self._name = name
        self._timeout = timeout
        self._number = 0  # of exchanges
        self._moves = f"torchft/restore/{name}/moves"  # how often a rank has got on
        self._told = 0.0  # when this rank said so
        self.group_rank = group_rank
        self.group_world_size = group_world_size

    def exchange(self, value: str) -> list[str]:
        """Returns the values of all ranks.

        Raises:
            RuntimeError: a rank gave none, and none has got on for the timeout.
        """
        if self.group_world_size == 1:
            return [value]
        self._number += 1
        keys = [
            f"torchft/restore/{self._name}/{self._number}/{rank}" for rank in range(self.group_world_size)
        ]
        self._store.set(keys[self.group_rank], value)
        before = self._store.add(self._moves, 0)
        while True:
            try:
                self._store.wait(keys, self._timeout)
                return [each.decode() for each in self._store.multi_get(keys)]
            except RuntimeError:  # it timed out, or there is no store any more
                if (now := self._store.add(self._moves, 0)) == before:
                    raise
                before = now

    def moved(self) -> None:
        """Says that this rank gets on with a copy: the others wait on."""
        now = time.monotonic()
        if self.group_world_size > 1 and now - self._told > self._timeout.total_seconds() / 4:
            self._told = now
            self._store.add(self._moves, 1)


class Choice:
    """The copy that a group can begin with. All ranks of the group make the same calls.

    Args:
        ranks: the ranks of the group.
        reach: what this rank can load.
        say: called with the reason for each copy that this rank does not load.

    Attributes:
        newest: this rank's copy of the newest step that all ranks can load; None: there is none.

    Raises:
        RuntimeError: another rank did not answer in time; from each method, too.
    """

    newest: Optional[Reachable] = None

    def __init__(self, ranks: Ranks, reach: Sequence[Reachable], say: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._left = list(reach)
        self._say = say
        self._choose()

    def _choose(self) -> None:
        while True:
            own = {(one.step, one.quorum): one for one in self._left}
            lists = [json.loads(each) for each in self._ranks.exchange(json.dumps(list(own)))]
            common = set(own).intersection(*({(step, quorum) for step, quorum in each} for each in lists))
            self.newest = own[max(common)] if common else None
            if self.newest is None or not self._refused(self.newest, self.newest.misfit()):
                return

    def open(self, refuses: Callable[[Slot], Optional[str]]) -> Optional[Slot]:
        """Reads and verifies the newest copy. Returns None if a rank cannot load its own: the ranks have
        chosen again then. `refuses`: returns why this rank does not load a copy; None: it does.
        """
        assert self.newest is not None
        slot = why = None
        try:
            slot = self.newest.open(self._ranks.moved)
            why = refuses(slot)
        except SlotError as error:
            why = str(error)
        if not self._refused(self.newest, why):
            return slot
        self._choose()
        return None

    def _refused(self, mine: Reachable, why: Optional[str]) -> bool:
        """Whether a rank of the group refuses its copy; ``why`` this one does, None: it does not."""
        if why is not None:
            self._say(f"the copy of step {mine.step} in {mine.where} is not loaded: {why}")
            self._left.remove(mine)
        return any(self._ranks.exchange("" if why is None else "refused"))
