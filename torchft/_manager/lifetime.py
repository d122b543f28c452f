"""The end of Managers that nobody has shut down: an earlier one of the same group in this process (the cell
of a notebook was run again), and one without references.

A thread that waits for a Manager's notices or quorums must not keep the Manager alive, so it refers to its
methods by :func:`torchft.utils.weakly`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

if TYPE_CHECKING:
    from torchft._manager.settings import Settings

_logger = logging.getLogger("torchft.manager")


class Life(NamedTuple):
    """Identifies the rank and group of a Manager.

    Attributes:
        replica_id: the name that the caller gave to the group, without the UUID; empty if there is none.
        group_rank: rank in the group.
        lighthouse: address of the lighthouse.
        store: address of the group's store.
        thread: the thread that made the Manager.
    """

    replica_id: str
    group_rank: int
    lighthouse: Optional[str]
    store: str
    thread: threading.Thread

    @classmethod
    def begin(cls, replica_id: Optional[str], settings: Settings) -> Life:
        """Identifies a Manager that the calling thread makes."""
        store = f"{settings.store_addr}:{settings.store_port}"
        here = threading.current_thread()
        return cls(replica_id or "", settings.group_rank, settings.lighthouse_addr, store, here)

    def repeats(self, earlier: Life) -> bool:
        """Whether this is the same rank of the same group; groups without a name differ by their stores."""
        if (self.replica_id, self.group_rank, self.lighthouse) != (
            earlier.replica_id,
            earlier.group_rank,
            earlier.lighthouse,
        ):
            return False
        return self.replica_id != "" or self.store == earlier.store

    def replaces(self, earlier: Life) -> bool:
        """Whether this thread has made the earlier Manager too, or its thread has ended: nobody uses it any
        more.

        Another thread may run a group of its own which has the same name by mistake, as in tests.
        """
        return earlier.thread is self.thread or not earlier.thread.is_alive()


_running: weakref.WeakKeyDictionary[Any, Life] = weakref.WeakKeyDictionary()


def began(manager: Any, life: Life) -> None:
    """Records a Manager that is complete."""
    _running[manager] = life


def ended(manager: Any) -> None:
    """Forgets a Manager that is shut down."""
    _running.pop(manager, None)


def earlier(life: Life) -> list[Any]:
    """The Managers that one with this life replaces. Warns of those that it only disturbs."""
    found = []
    for manager in [manager for ref in _running.keyrefs() if (manager := ref()) is not None]:
        its = _running.get(manager)
        if its is None or not manager._maker.here or not life.repeats(its):
            continue
        if life.replaces(its):
            found.append(manager)
        else:
            _logger.warning(
                "another Manager of this group and rank runs in this process: %s, made on the thread %r. "
                "Both are members of the job, and each waits for the other one. Shut one of them down, or "
                "give each group its own replica_id",
                manager._logger.prefix(),
                its.thread.name,
            )
    return found
