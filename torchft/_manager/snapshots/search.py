"""The copies that a group can begin with: slots of this host, in memory and on disk, and of other hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

from torchft._manager.snapshots.restore import Reachable, given_up
from torchft.checkpointing.snapshots import reading, remote, slots, stored
from torchft.checkpointing.snapshots.fits import misfit
from torchft.checkpointing.snapshots.reading import Source
from torchft.checkpointing.snapshots.remote import Held
from torchft.checkpointing.snapshots.shares import missing
from torchft.checkpointing.snapshots.slots import SlotError, StateKey

# How long a group waits for other hosts that begin as well, if a later step can be restored with them, and
# how often it asks for them.
HOSTS_SEC, _ASK_SEC = 30.0, 0.5


class Search(NamedTuple):
    """A search for the copies that a rank can begin with.

    Attributes:
        job, group, rank, ranks: its job, its group, its rank in that, and the ranks of a group.
        lighthouse: addresses of its lighthouse; empty: it has none.
        folder: of the job's checkpoints; None: it has none.
        patience: seconds to wait for other hosts.
        say: called with the reason for what is not loaded.
    """

    job: str
    group: str
    rank: int
    ranks: int
    lighthouse: str
    folder: Optional[Path]
    patience: float
    say: Callable[[str], None]

    def run(self, own: Callable[[], Any]) -> list[Reachable]:
        """Returns the states that the rank can load, but those that the job has given up. `own`: returns the
        state that it has. SlotError: as in :func:`slots.root`.
        """
        here, on_disk = list(self._in_memory()), list(self._on_disk())
        until, waits = time.monotonic() + self.patience, False
        while True:
            states: dict[StateKey, list[Held]] = {}
            for one in (*here, *on_disk, *self._elsewhere()):
                states.setdefault(one.header.state, []).append(one)
            lacks = {
                state: lacks
                for state, of in states.items()
                if (lacks := missing([one.header.share for one in of]))
            }
            best = max((state for state in states if state not in lacks), default=None)
            newer = [
                one.header.state
                for one in on_disk
                if one.header.state in lacks and (best is None or one.header.state > best)
            ]
            if not newer or not self.lighthouse or time.monotonic() > until:
                break
            if not waits:
                waits = True
                self.say(
                    f"waits up to {self.patience:g} s for the hosts that have parts "
                    f"{list(lacks[max(newer)])} of step {max(newer).step} on their disks"
                )
            time.sleep(_ASK_SEC)
        for state, parts in lacks.items():
            self.say(
                f"the copy of step {state.step} is not loaded: no host that is left has its parts "
                f"{list(parts)}"
            )
        return self._wanted([_reachable(*each, own) for each in states.items() if each[0] not in lacks])

    def _in_memory(self) -> Iterator[Held]:
        for path, header in slots.found(self.job, self.group, self.rank, self.say, self.lighthouse):
            if header.group_world_size == self.ranks:
                yield Held(header, reading.local(path))
            else:
                self.say(
                    f"{path} is not loaded: it is of a group of {header.group_world_size} ranks, and this "
                    f"one has {self.ranks}"
                )

    def _on_disk(self) -> Iterator[Held]:
        if self.folder is None:
            return
        try:
            kept = stored.found(self.folder, self.job, self.say)
            stored.tell(slots.root() / slots.quoted(self.job), kept, self.folder)
        except OSError as error:
            self.say(f"parts of states in {self.folder} are not read: {error.strerror}")
            return
        for path, header in kept:
            if (header.group_rank, header.group_world_size) == (self.rank, self.ranks):
                yield Held(header, reading.local(path))

    def _elsewhere(self) -> list[Held]:
        if not self.lighthouse:
            return []
        try:
            found = remote.held(self.lighthouse, self.job, self.say)
        except SlotError as error:
            self.say(str(error))
            return []
        which = (self.rank, self.ranks)
        return [one for one in found if (one.header.group_rank, one.header.group_world_size) == which]

    def _wanted(self, reach: list[Reachable]) -> list[Reachable]:
        """Without the states of a history that the job has given up."""
        shown = given_up(reach)
        for one, other in shown:
            self.say(
                f"the copy of step {one.step} is not loaded: the job went on from an earlier step without "
                f"it, as that of step {other.step} shows, in {other.where}"
            )
        return [one for one in reach if one not in [each for each, _ in shown]]


def _reachable(state: StateKey, held: list[Held], own: Callable[[], Any]) -> Reachable:
    sources = [one.source for one in held]
    where = " or ".join(one.source.where for one in held if one.header.share.whole)
    return Reachable(
        state.step,
        state.quorum,
        where or f"{len(held)} slots with parts of it",
        partial(_misfit, sources, own),
        partial(reading.read, sources, state),
        max(one.header.saved for one in held),
    )


def _misfit(sources: list[Source], own: Callable[[], Any]) -> Optional[str]:
    """Why the structure of a state does not fit the rank, as the first slot that can be read has it."""
    causes = []
    for source in sources:
        try:
            return misfit(reading.read_index(source).tree, own())
        except SlotError as error:
            causes.append(str(error))
    return "; ".join(causes)
