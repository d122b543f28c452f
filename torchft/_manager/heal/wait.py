"""Lets the groups of a quorum wait for those of them that heal, as long as their heals make progress.

A group that heals at once reduces only after its heal. The others would wait for it in a collective, whose
timeout is that of a peer that hangs: a heal that takes longer was given up, and began anew in the next step.
So in a quorum in which groups may heal, all ranks wait before their first reduction (or their vote) until
every group is ready. Each rank adds its progress to a counter in the store of the first group's reconfigure
handle; native handles name none, so their groups take the rendezvous store of the quorum. A rank gives up
when that counter has not moved for the timeout.

A group that heals in passing is ready as soon as it has its quorum, like those that do not heal. The others
then wait only until they have read that, in each step of such a heal: so the client of the store is kept from
step to step.

A vote has a timeout, too, and the ranks of a group heal from different ranks. So a rank begins only when all
ranks of its group may: they count the same in the store of their group.

Only groups whose handle says that they do this wait for each other; upstream groups do not.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Callable, Iterator, Optional

from torchft.process_group._attempt import ConnectionAttempt, running
from torchft.process_group.reconfigure import Handle, create_store_client

if TYPE_CHECKING:
    from torch.distributed import Store

    from torchft._manager.heal.together import GroupRanks
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.rank import RankState

# A TCPStore tries to connect for about twice its timeout: a few seconds.
_CONNECT_TIMEOUT = timedelta(seconds=2)
# The shortest and the longest pause between two looks at a counter. Between them it is a part of the time for
# which the counter has not moved, so that a look that comes late adds only that part to a wait.
_PAUSE_SEC = 0.001, 0.05
_PAUSE_PART = 0.05
# Seconds between two looks for a failure of a peer.
_LOOK_SEC = 0.01
# A counter has the number of those that are ready above this, and below it the number of reports of progress.
_READY = 1 << 32


_counting = threading.Lock()  # not held while a store answers


class SharedCounter:
    """A counter of progress in a store, as one of its `members` sees it.

    Args:
        ready: the keys of the counters in which this one counts as ready. A script may begin a step again, in
            the same quorum: then it counts once, and not while it heals again.
        old: the key of an earlier step, which is deleted: all have asked for a later quorum since; empty:
            none.
    """

    def __init__(self, store: Store, key: str, members: int, ready: set[str], old: str = "") -> None:
        if old and old != key:
            store.delete_key(old)
        self._store = store
        self._key = key
        self._members = members
        self._value = 0
        self._ready = ready

    def count(self, moved: bool, ready: bool) -> bool:
        """Adds that this one has made progress since the last call, and whether it is ready. Returns whether
        the counter has moved.
        """
        with _counting:
            counted = self._key in self._ready
            (self._ready.add if ready else self._ready.discard)(self._key)
        add = int(moved) + _READY * (ready - counted)
        before, self._value = self._value, self._store.add(self._key, add)
        return self._value != before

    @property
    def all_ready(self) -> bool:
        """Whether all were ready at the last look."""
        return self._value >= self._members * _READY


@dataclass(eq=False)
class _Wait:
    """The wait of one rank in one step. A thread counts, because a store may not answer."""

    address: str  # of the store of the column, which is this rank and its counterparts in the other groups
    clients: dict[str, Store]  # clients of stores by address, which no wait uses now
    groups: int  # their number
    ranks: GroupRanks
    key: str  # of the counters of this step
    counts: set[str]  # the keys of those in which this rank counts as ready
    old: str  # the key of the latest counters before

    def __post_init__(self) -> None:
        self.received = 0  # bytes of this rank's heal
        self.ready = False  # whether this rank has no heal, or has ended it
        self.moved_at = time.monotonic()
        self.attempt: ConnectionAttempt[None] = ConnectionAttempt(self._count, list.clear, _CONNECT_TIMEOUT)
        self.attempt.start()

    def _count(self) -> None:
        attempt, told, ranks = running(), 0, self.ranks
        client = self.clients.pop(self.address, None) or create_store_client(self.address, _CONNECT_TIMEOUT)
        column, group = SharedCounter(client, self.key, self.groups, self.counts, self.old), None
        if ranks.size > 1:
            own = f"torchft/{ranks.name}/"
            old = own + self.old if self.old else ""
            group = SharedCounter(ranks.store, own + self.key, ranks.size, self.counts, old)
        shortest, longest = _PAUSE_SEC
        while attempt is not None and attempt.abandoned is None:
            received, ready = self.received, self.ready  # read once: other threads set them
            moved, told = column.count(received > told, ready), max(told, received)
            if group is not None:
                moved = group.count(moved, column.all_ready) or moved
            if (group or column).all_ready:
                break
            if moved:
                self.moved_at = time.monotonic()
            time.sleep(min(longest, shortest + _PAUSE_PART * (time.monotonic() - self.moved_at)))
        self.clients[self.address] = client  # not after an error


@dataclass(eq=False)
class HealWait:
    """The waits of one rank for groups that heal.

    Attributes:
        waiting: the wait of the step in progress; None: no group heals in it, or all have healed.
    """

    check_peers: Callable[[], None]  # raises an error if a peer is known to have failed
    rank_state: RankState  # has the timeout without progress
    ranks: GroupRanks
    logger: _ManagerLogger

    def __post_init__(self) -> None:
        self._key = ""  # of the latest counters
        self._counts: set[str] = set()
        self._clients: dict[str, Store] = {}
        self.waiting: Optional[_Wait] = None

    @property
    def waited_for(self) -> bool:
        """Whether the other groups wait for this one in this step, if it heals at once."""
        return self.waiting is not None

    @contextmanager
    def following(self, plan: Plan) -> Iterator[None]:
        """Surrounds what a rank does before the reductions of a step: a heal at once, for example."""
        self.end()
        store = self._counters(plan) if plan.awaits_heals else ""
        for other in [address for address in self._clients if address != store]:
            self._clients.pop(other, None)
        if not store:
            yield
            return
        old, self._key = self._key, f"heals/{plan.quorum_id}/{plan.max_step}"
        if old != self._key:
            self._counts = set()
        groups = plan.replica_world_size
        self.waiting = now = _Wait(store, self._clients, groups, self.ranks, self._key, self._counts, old)
        try:
            yield
        finally:
            now.ready = True

    def _counters(self, plan: Plan) -> str:
        """The address of the store of the column."""
        if not plan.handles[0].startswith("{"):  # native
            # Several ranks may share this store.
            return f"{plan.store_address}/torchft/heals/{self.ranks.number}"
        return Handle.decode(plan.handles[0]).store

    def received(self, nbytes: int) -> None:
        """Reports progress of this rank's heal: the bytes that have arrived."""
        now = self.waiting
        if now is not None:
            now.received = max(now.received, nbytes)

    def wait(self) -> None:
        """Returns when no group heals any more. Called before each reduction and each vote of a step.

        Raises:
            Exception: a peer has failed.
            TimeoutError: no heal has made progress for the timeout.
        """
        now = self.waiting
        if now is None:
            return
        begun, timeout = time.monotonic(), self.rank_state.timeout.total_seconds()
        try:
            with self.rank_state.doing("waits for a group that heals"):
                while not now.attempt.wait(_LOOK_SEC):
                    self.check_peers()
                    if time.monotonic() - max(begun, now.moved_at) > timeout:
                        raise TimeoutError(
                            "timed out: a group of this quorum heals, and has received nothing for "
                            f"{timeout:g} s"
                        )
            if now.attempt.error is not None:
                self.logger.warn(f"it is not known whether all groups have healed: {now.attempt.error}")
        finally:
            self._end(now)

    def end(self) -> None:
        """Ends the wait of a step that is over."""
        if self.waiting is not None:
            self._end(self.waiting)

    def _end(self, wait: _Wait) -> None:
        if self.waiting is wait:
            self.waiting = None
        wait.attempt.abandon(RuntimeError("the step is over"))
