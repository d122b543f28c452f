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

import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Callable, Iterator, Optional

from torchft.process_group._attempt import ConnectionAttempt, running
from torchft.process_group.reconfigure import Handle, create_store_client

if TYPE_CHECKING:
    from torch.distributed import Store

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


class SharedCounter:
    """A counter of progress in a store, as one of those that share it sees it.

    Args:
        store: the store.
        key: the key of the counter.
        members: the number of those that share it.
        old: the key of an earlier step, which is deleted: all have asked for a later quorum since; empty:
            none.
    """

    def __init__(self, store: Store, key: str, members: int, old: str = "") -> None:
        if old and old != key:
            store.delete_key(old)
        self._store = store
        self._key = key
        self._members = members
        self._value = 0
        self._ready = False

    def count(self, moved: bool, ready: bool) -> bool:
        """Adds this one's news, and reads the counter. Returns whether it has moved.

        Args:
            moved: whether this one has made progress since the last call.
            ready: whether this one is ready; in every call from then on.
        """
        add = int(moved) + (_READY if ready and not self._ready else 0)
        self._ready = self._ready or ready
        before, self._value = self._value, self._store.add(self._key, add)
        return self._value != before

    @property
    def all_ready(self) -> bool:
        """Whether all were ready at the last look."""
        return self._value >= self._members * _READY


class _Wait:
    """The wait of one rank in one step. A thread counts, because a store may not answer.

    Args:
        address: of the store of the column, which is this rank and its counterparts.
        clients: clients of stores by address, which no wait uses now.
        column: makes the counter of the column.
        group: makes the counter of the group; None: it has one rank.
    """

    def __init__(
        self,
        address: str,
        clients: dict[str, Store],
        column: Callable[[Store], SharedCounter],
        group: Optional[Callable[[], SharedCounter]],
    ) -> None:
        self._address = address
        self._clients = clients
        self._column = column
        self._group = group
        self.received = 0  # bytes of this rank's heal
        self.ready = False  # whether this rank has no heal, or has ended it
        self.moved_at = time.monotonic()
        self.attempt: ConnectionAttempt[None] = ConnectionAttempt(self._count, list.clear, _CONNECT_TIMEOUT)
        self.attempt.start()

    def _count(self) -> None:
        client = self._clients.pop(self._address, None) or create_store_client(
            self._address, _CONNECT_TIMEOUT
        )
        self._count_with(client)
        self._clients[self._address] = client  # not after an error

    def _count_with(self, client: Store) -> None:
        attempt, told = running(), 0
        column = self._column(client)
        group = None if self._group is None else self._group()
        shortest, longest = _PAUSE_SEC
        while attempt is not None and attempt.abandoned is None:
            received, ready = self.received, self.ready  # read once: other threads set them
            moved, told = column.count(received > told, ready), max(told, received)
            if group is not None:
                moved = group.count(moved, column.all_ready) or moved
            if (group or column).all_ready:
                return
            if moved:
                self.moved_at = time.monotonic()
            time.sleep(min(longest, shortest + _PAUSE_PART * (time.monotonic() - self.moved_at)))


class HealWait:
    """The waits of one rank for groups that heal.

    Args:
        check_peers: raises an error if a peer is known to have failed.
        rank_state: has the timeout without progress.
        store: the store that all ranks of the group share.
        name: the replica id of this incarnation of the group.
        group_rank: this rank.
        group_world_size: the number of ranks in the group.

    Attributes:
        waiting: the wait of the step in progress; None: no group heals in it, or all have healed.
    """

    def __init__(
        self,
        check_peers: Callable[[], None],
        rank_state: RankState,
        store: Store,
        name: str,
        group_rank: int,
        group_world_size: int,
        logger: _ManagerLogger,
    ) -> None:
        self._check_peers = check_peers
        self._rank_state = rank_state
        self._store = store
        self._name = name
        self._group_rank = group_rank
        self._group_world_size = group_world_size
        self._logger = logger
        self._key = ""  # of the latest counters
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
        column, group = partial(SharedCounter, key=self._key, members=plan.replica_world_size, old=old), None
        if self._group_world_size > 1:
            own = f"torchft/{self._name}/"
            members, old = self._group_world_size, own + old if old else ""
            group = partial(SharedCounter, self._store, own + self._key, members, old)
        self.waiting = now = _Wait(store, self._clients, column, group)
        try:
            yield
        finally:
            now.ready = True

    def _counters(self, plan: Plan) -> str:
        """The address of the store for the counters of this rank and its counterparts in the other groups."""
        if not plan.handles[0].startswith("{"):  # native
            # Several ranks may share this store.
            return f"{plan.store_address}/torchft/heals/{self._group_rank}"
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
        begun, timeout = time.monotonic(), self._rank_state.timeout.total_seconds()
        try:
            with self._rank_state.doing("waits for a group that heals"):
                while not now.attempt.wait(_LOOK_SEC):
                    self._check_peers()
                    if time.monotonic() - max(begun, now.moved_at) > timeout:
                        raise TimeoutError(
                            "timed out: a group of this quorum heals, and has received nothing for "
                            f"{timeout:g} s"
                        )
            if now.attempt.error is not None:
                self._logger.warn(f"it is not known whether all groups have healed: {now.attempt.error}")
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
