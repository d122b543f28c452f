"""Copies of one rank's state, from which the job begins again after a failure of all groups.

A copy begins when a step begins, with the state that the step before has left, and ends before the weights
change: a thread writes it to a slot in shared memory (checkpointing/snapshots/slots.py) while the model runs.
Whatever a forward pass may change is copied at once.

A job that begins announces the newest copy with its first request for a quorum (restore.py). Its answer
decides whether the group loads that, or heals from a group with a later state.

All ranks of a group copy at the same steps. Unless the steps are given, rank 0 chooses them: with each copy
it puts the step of the next one into the group's store, before it votes on the present step. Where each group
keeps a part, all groups must copy at the same steps: each announces the number of steps that its copies need,
and the largest in the quorum counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from torchft import _keeper
from torchft._manager.rank import Position
from torchft._manager.snapshots.changes import Changed, Versions
from torchft._manager.snapshots.rate import Rate
from torchft._manager.snapshots.restore import Choice, Ranks, Reachable
from torchft._manager.snapshots.search import HOSTS_SEC, Search
from torchft.checkpointing.client.target import BufferMap
from torchft.checkpointing.codec.encoding import Encoded
from torchft.checkpointing.codec.layout import plain_node, tensor_nodes, tensors_by_path
from torchft.checkpointing.snapshots import due, slots
from torchft.checkpointing.snapshots.due import FINISHED, Due, read_status, unwritten
from torchft.checkpointing.snapshots.fits import misfit
from torchft.checkpointing.snapshots.reading import Slot
from torchft.checkpointing.snapshots.shares import WHOLE, Share
from torchft.checkpointing.snapshots.slots import Header, SlotError
from torchft.checkpointing.source.offer import with_copies
from torchft.utils import DeviceThread

if TYPE_CHECKING:
    from torch.distributed import Store

    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.settings import Settings

# The longest wait for the end of a copy. One that takes longer hangs, for example with the device.
_LONGEST_WAIT_SEC = 15.0
_POLL_SEC = 0.005
_OFF = "off"  # instead of the step of the next copy


class _Work:
    """A copy that is being made."""

    def __init__(
        self, path: Path, versions: Versions, pieces: Iterator[int], then: Callable[[], None], began: float
    ) -> None:
        self.path = path  # of the slot
        self.versions = versions  # of the tensors that are copied
        self._pieces = pieces
        self._then = then
        self.began = began
        self.waited = time.monotonic() - began  # by the training thread
        self.took = 0.0
        self.abandoned = False
        self.complete = False
        self.error: Optional[Exception] = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Makes the copy, on another thread."""
        try:
            for _ in self._pieces:
                if self.abandoned:
                    break
            else:
                self.complete = True
            self._pieces.close()  # type: ignore[attr-defined]
            self._then()
        except Exception as error:
            self.error = error
        self.took = time.monotonic() - self.began
        self.ended.set()


def _nothing() -> None: ...


def _placed(slot: Slot, state: Any) -> Any:
    """The state of a slot. Tensors that the rank's own state lacks are on a device if they were on one."""
    own = tensors_by_path(state)
    nodes = {path: plain_node(node)[1] for path, node in tensor_nodes(slot.tree).items()}
    devices = [region.device for region in slot.regions]
    home = BufferMap(own, {path: devices[region] for path, region in nodes.items()})
    for region in {region for path, region in nodes.items() if path not in own}:
        slot.flats[region] = slot.flats[region].to(home.of(devices[region]))
    return slot.state()


class State(NamedTuple):
    """The state that is copied.

    Attributes:
        read: returns it. Called on the training thread, when a step begins.
        load: loads it, on the training thread.
        own: returns what a rank has before it loads, with the paths of ``read``: tensors that differ are
            found before anything is loaded.
    """

    read: Callable[[], Any]
    load: Callable[[Any], None]
    own: Callable[[], Any]


class Snapshots:
    """Makes copies of one rank's state, and begins with one.

    Args:
        settings: of this rank; ``snapshots`` is the number of steps between two copies, 0 for none, None: as
            many as keep the cost below 1 % of the time.
        store: of the group.
        replica_id: of this incarnation of the group.
        state: the state.
        unchanged: returns the addresses of tensors that change only when a step ends.
        obstacle: returns why this job makes no copies; None: it can.
        news: called when the other groups are to hear what it announces.
        logger: of the Manager.

    Attributes:
        on: whether a step may have something to do here.
        sought: whether this process has looked for a copy to begin with.
        otherwise: loads what the group begins with if no copy can be loaded that it has announced.
        restored: whether this process goes on from a copy, and has committed nothing since.
        state: the argument; a job replaces it before the first step.
        mark: a step, and where its copy is to be written to as well; None: none is.
        copied: the step of the last copy that is complete.
        folder: of the job's checkpoints; None: it has none.
        member: the number of this group among those that committed the last step together, None if it was not
            one of them, and how many these were.
        announces: steps between two copies that the copies of this group need; empty: it chooses them alone.
        agreed: the most that a group of the quorum announces; 0: none does.
    """

    sought = False
    restored = False

    def __init__(
        self,
        settings: Settings,
        store: Store,
        replica_id: str,
        state: State,
        unchanged: Callable[[], Collection[int]],
        obstacle: Callable[[], Optional[str]],
        news: Callable[[], None],
        logger: _ManagerLogger,
    ) -> None:
        self.on = settings.snapshots != 0
        self.state = state
        self.otherwise: Callable[[], object] = lambda: None
        self.mark: Optional[tuple[int, Due]] = None
        self.copied = -1
        self.folder: Optional[Path] = None
        self.member: tuple[Optional[int], int] = None, 0
        self._every = settings.snapshots
        self._copies = settings.snapshot_copies
        self.announces = str(self._every or 2) if self._copies and self.on else ""  # 2: see settings.py
        self.agreed = 0
        self._news = news
        self._group, named, _ = replica_id.partition(":")
        self._named = bool(named)
        self._store = store
        self._key = f"torchft/snapshots/{replica_id}"
        self._ranks = Ranks(
            store, replica_id, settings.group_rank, settings.group_world_size, settings.timeout
        )
        self._limit = min(_LONGEST_WAIT_SEC, settings.timeout.total_seconds())
        # Another rank of this group may have all of its parts: it waits for this one in the meantime.
        self._patience = min(HOSTS_SEC, settings.timeout.total_seconds() / 2)
        self._lighthouse = settings.lighthouse_addr or ""
        self._unchanged = unchanged
        self._obstacle = obstacle
        self._logger = logger
        self._moving: set[int] = set()  # addresses of tensors that have changed while they were copied
        self._lock: Optional[int] = None  # the file that is locked
        self._rate = Rate()
        self._number = 0  # of copies so far
        self._choice: Optional[Choice] = None  # what this group can begin with
        self._exhausted = False  # it has announced a copy, and could load none
        self._last = -1  # step of the last copy
        self._next: Optional[int] = None  # step of the next one, unless steps are given
        self._began: Optional[tuple[int, float, bool]] = None  # step, time, and whether it has a copy
        self._work: Optional[_Work] = None

    @property
    def works(self) -> bool:
        """Whether copies are made."""
        return self._lock is not None

    @property
    def owed(self) -> bool:
        """Whether the copy that is to be written to disk is not complete."""
        return self.mark is not None and self.mark[0] > self.copied

    # The begin of a job

    def seek(self, beyond: int) -> bool:
        """Looks for the newest copy, of a step after ``beyond``, that all ranks of the group have. Returns
        whether there is one. Called by all ranks, on the training thread, before the first quorum.
        RuntimeError: another rank of this group did not answer.
        """
        self.sought = True
        if self._exhausted:
            return False
        reach: list[Reachable] = []
        own = cache(self.state.own)  # a function of the user's, called once and only for a copy
        try:
            if (why := self._obstacle()) is not None:
                raise SlotError(why)
            if not self._named:
                raise SlotError("this group has no name that stays the same: give Manager a replica_id")
            if self._lock is None:
                self._take_slots()
            search = Search(
                self._job,
                self._group,
                self._ranks.group_rank,
                self._ranks.group_world_size,
                self._lighthouse,
                self.folder,
                self._patience,
                self._logger.warn,
            )
            reach = [one for one in search.run(own) if one.step > beyond]
        except SlotError as error:
            self._turn_off(str(error))
        self._choice = Choice(self._ranks, reach, self._logger.warn)
        return self._choice.newest is not None

    def found(self, own: Position) -> Optional[Reachable]:
        """Returns the copy that this group can load, if it is of a later step than its own state."""
        newest = None if self._choice is None else self._choice.newest
        return newest if newest is not None and newest.step > own.step else None

    def load(self) -> Optional[Position]:
        """Loads the copy that the group has found, and returns its position. All ranks call it, on the
        training thread: no group of the quorum has a later state. Returns None if a rank could not load its
        own copy: nothing is loaded then, and the next older copy is found instead. If there is none, the
        group begins with what ``otherwise`` loads. RuntimeError: another rank of this group did not answer;
        or a copy that fits could not be loaded.
        """
        assert self._choice is not None
        own = cache(self.state.own)
        slot = self._choice.open(lambda slot: misfit(slot.tree, own()))
        if slot is None:
            if self._choice.newest is None:
                self._exhausted = True
                self.otherwise()
            return None
        self._choice = None
        header, where = slot.header, slot.where
        began = time.monotonic()
        try:
            self.state.load(_placed(slot, own()))
        except Exception as error:
            raise RuntimeError(
                f"the copy of step {header.step} in {where} could not be loaded, and some weights may have "
                f"changed: {error}; with TORCHFT_SNAPSHOTS=0 the job begins without it"
            ) from error
        self.restored, self._last = True, header.step
        # Who starts the script anew may expect it to begin at step 0. One rank says it for the group.
        tell = self._logger.info if self._ranks.group_rank else self._logger.warn
        tell(
            f"goes on from step {header.step}, of which {where} has a copy: {header.nbytes >> 20} MiB loaded "
            f"in {time.monotonic() - began:.2f} s; with TORCHFT_SNAPSHOTS=0 the job begins without it"
        )
        return Position(header.step, header.batches, header.quorum)

    def _take_slots(self) -> None:
        self._job = slots.job_name()
        self._folder = slots.folder_of(self._job, self._group, self._ranks.group_rank)
        self._lock = slots.hold(self._folder, self._lighthouse)
        if self._lock is None:
            raise SlotError(
                f"another process, which lives, has the slots of this rank: {self._folder}; each group needs "
                f"its own replica_id, and each job on a host its own {slots.JOB_ENV}"
            )
        (self._folder / FINISHED).unlink(missing_ok=True)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun's: one rank of each host
            _keeper.ensure(self._job, self._lighthouse)

    # Steps

    def begin(self, position: Position) -> None:
        """Begins a copy if one is due. On the training thread, when the weights are those of the position."""
        step, now = position.step, time.monotonic()
        if self._began is not None and self._began[0] == step - 1:
            self._rate.step(now - self._began[1], self._began[2])
        again = self._began is not None and self._began[0] == step
        self._began = None if again else (step, now, False)
        if self._lock is None or position.committed_quorum_id < 0:
            return
        if step <= self._last or not (self._marked(step) or self._due(step)):
            return
        if (why := self._obstacle()) is not None:
            self._turn_off(why)
            return
        if self._began is not None:
            self._began = step, now, True
        self._copy(position)

    def last(self, position: Position) -> None:
        """Copies the state of the last step, whether or not a copy is due: a group that leaves on request
        loses nothing. Called on the training thread, when no step is in progress.
        """
        if self._lock is None or position.committed_quorum_id < 0 or position.step <= self._last:
            return
        if self._obstacle() is None:
            self._copy(position, last=True)
            self.end()

    def _copy(self, position: Position, last: bool = False) -> None:
        self._last = position.step
        part, parts = self.member
        if self._copies and part is None:
            return  # the groups that committed the step keep it among themselves
        share = WHOLE if part is None else Share.of(part, parts, self._copies)
        try:
            self._start(position, last, share)
        except Exception as error:
            self._turn_off(f"its state cannot be copied: {error}")

    def _marked(self, step: int) -> Optional[Due]:
        return self.mark[1] if self.mark is not None and self.mark[0] == step else None

    def _due(self, step: int) -> bool:
        if (every := self.agreed if self.announces else self._every) is not None:
            return every > 0 and step % every == 0
        if self._next is None:
            self._next = step + 1  # the step after the first, which takes longer than the others
        return step >= self._next

    def _start(self, position: Position, last: bool, share: Share) -> None:
        began = time.monotonic()
        self._number += 1
        state, _ = with_copies(self.state.read(), self._unchanged(), self._moving)
        encoded, versions = Encoded(state), Versions(state)
        nbytes = sum(storage.nbytes() for storage in encoded.storages)
        agreed = self._every is None and not last  # on the step of the next one
        if agreed and self._ranks.group_rank == 0:
            self._next = position.step + self._rate.next(nbytes)
            self._tell(str(self._next), self._number)
        header = Header(
            self._job,
            self._group,
            self._ranks.group_rank,
            self._ranks.group_world_size,
            position.step,
            position.batches_committed,
            position.committed_quorum_id,
            saved=0.0,
            disk=self._marked(position.step),
            share=share,
        )
        status = read_status(self._folder.parents[1])
        path = slots.pick(slots.headers(self._folder), lambda header: due.kept(header, status))
        hears = agreed and self._ranks.group_rank > 0
        then = partial(self._hear, f"{self._key}/{self._number}") if hears else _nothing
        pieces = slots.write(path, header, encoded, lambda: not versions.changed())
        work = self._work = _Work(path, versions, pieces, then, began)
        DeviceThread(work.run, "torchft_snapshots").start()

    def _tell(self, following: str, number: int) -> None:
        """Tells the other ranks of this group the step of the copy of a number."""
        if self._ranks.group_world_size > 1:
            self._store.set(f"{self._key}/{number}", following)
            self._store.delete_key(f"{self._key}/{number - 2}")

    def abandon(self) -> None:
        """Ends a copy without a result, on any thread: the weights are about to change."""
        work = self._work  # read once: the training thread may end it
        if work is not None:
            work.abandoned = True

    def end(self) -> None:
        """Waits for the copy in progress, on the training thread: the weights are about to change."""
        self.restored = False
        work, self._work = self._work, None
        if work is None:
            return
        began = time.monotonic()
        if not work.ended.wait(self._limit):
            work.abandoned = True
            self._turn_off(f"a copy has not ended within {self._limit:g} s")
            return
        work.waited += time.monotonic() - began
        if work.error is not None:
            self._turn_off(str(work.error))
        elif work.complete:
            self._rate.copied(work.took, work.waited)
            if self.announces and self._next is not None and self._next - self._last > self.agreed > 0:
                self.announces = str(self._next - self._last)  # never fewer: each change costs a quorum
                self._news()
            if changed := work.versions.changed():
                self._changed(work.path, changed)
            else:
                self.copied = self._last

    def _changed(self, path: Path, changed: list[Changed]) -> None:
        try:
            slots.invalidate(path)  # an operation may have been in progress when the slot was completed
        except SlotError as error:
            self._turn_off(str(error))
        self._moving.update(one.address for one in changed)
        names, nbytes = [one.name for one in changed], sum(one.nbytes for one in changed)
        listed = ", ".join(names[:3]) + " …" * (len(names) > 3)
        self._logger.warn(
            f"the copy of step {self._last} is not used: {listed} changed before the optimizer's step; from "
            f"now on {nbytes >> 20} MiB more are copied before the forward pass"
        )

    def _turn_off(self, why: str) -> None:
        self._logger.warn(f"no copy of this rank's state is made in memory any more: {why}")
        if self._every is None and self._ranks.group_rank == 0 and self._lock is not None:
            # The others may have begun a copy that this rank has not.
            for number in (self._number, self._number + 1):
                self._tell(_OFF, number)
        self._let_go()

    def _let_go(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            slots.let_go(lock)

    def close(self, finished: bool) -> None:
        """Ends the copy in progress, on any thread. `finished`: whether the training has ended on purpose:
        its slots are removed, by the writer of this host if it has yet to write one to disk.
        """
        self.abandon()
        if finished and self._lock is not None:
            told = read_status(self._folder.parents[1])
            found = [header for _, header in slots.headers(self._folder) if header is not None]
            if any(unwritten(header, told) for header in found):
                (self._folder / FINISHED).touch()
            else:
                slots.remove(self._folder)
        self._let_go()

    def _hear(self, key: str) -> None:
        """Gets the step of the next copy from rank 0. SlotError: rank 0 makes no copies, or says not when."""
        until = time.monotonic() + self._limit
        while not self._store.check([key]):  # a `get` would keep other threads from the store
            if time.monotonic() > until:
                raise SlotError("rank 0 of this group did not say when the next copy is due")
            time.sleep(_POLL_SEC)
        told = self._store.get(key).decode()
        if told == _OFF:
            raise SlotError("rank 0 of this group makes none")
        self._next = int(told)
