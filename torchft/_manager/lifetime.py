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
    """The identity of a Manager's rank: two lives of one rank have the same.

    Attributes:
        group: the name that the caller gave to the group, without the UUID; groups without a name differ by
            the addresses of their stores.
        group_rank: rank in the group.
        lighthouse: address of the lighthouse.
    """

    group: str
    group_rank: int
    lighthouse: Optional[str]


_running: weakref.WeakKeyDictionary[Any, tuple[Life, threading.Thread]] = weakref.WeakKeyDictionary()


def life_of(replica_id: Optional[str], settings: Settings) -> Life:
    """Identifies the Manager with this name and these settings."""
    group = replica_id or f"{settings.store_addr}:{settings.store_port}"
    return Life(group, settings.group_rank, settings.lighthouse_addr)


def began(manager: Any, life: Life) -> None:
    """Records a Manager that is complete, and the calling thread, which has made it."""
    _running[manager] = life, threading.current_thread()


def ended(manager: Any) -> None:
    """Forgets a Manager that is shut down."""
    _running.pop(manager, None)


def earlier(life: Life) -> list[Any]:
    """The Managers that one with this life replaces: this thread has made them, too, or their thread has
    ended, so that nobody uses them any more. Another thread may run a group of its own which has the same
    name by mistake, as in tests: that is only warned of.
    """
    found = []
    for manager in [manager for ref in _running.keyrefs() if (manager := ref()) is not None]:
        its, thread = _running.get(manager, (None, threading.current_thread()))
        if its != life or not manager._maker.here:
            continue
        if thread is threading.current_thread() or not thread.is_alive():
            found.append(manager)
        else:
            _logger.warning(
                "another Manager of this group and rank runs in this process: %s, made on the thread %r. "
                "Both are members of the job, and each waits for the other one. Shut one of them down, or "
                "give each group its own replica_id",
                manager._logger.prefix(),
                thread.name,
            )
    return found
