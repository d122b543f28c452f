"""The collectives of one step, from the first to the end of the last, and the error that spoils the step."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Callable, Optional

from torchft._manager.errors import ExceptionWithTraceback

if TYPE_CHECKING:
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.work import _ManagedWork

# How long the aborted collectives of a step may take to end. Gloo's take some 10 ms; but in one of a hundred deaths it
# forgets a send, which then waits for its own timeout.
_DRAIN_SEC = 0.5
# How often it is looked whether one that was forgotten is over.
_LOOK_SEC = 0.01


class Collectives:
    """What runs in a step, and whether it is of use.

    Args:
        abort: aborts the process group.
        logger: gives the Manager's logger; it is made after this.
        at_once: how many collectives hold all threads of the process group, also for its next peers; None: new peers
            come with new threads.

    Attributes:
        error: the first one of the step; with it the step is not committed.
        usable: whether more of them make sense. A failed heal spoils the step of its group, but its peers still count
            on it in their collectives.
        aborted: whether the process group was aborted in this step.
    """

    def __init__(
        self, abort: Callable[[], None], logger: Callable[[], _ManagerLogger], at_once: Optional[int] = None
    ) -> None:
        self._abort = abort
        self._logger = logger
        self._at_once = at_once
        self._left: list[_ManagedWork] = []  # of earlier steps: aborted, and not over in the backend
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self.error: Optional[ExceptionWithTraceback] = None
        self.usable = True
        self.aborted = False
        self._works: list[_ManagedWork] = []

    def __len__(self) -> int:
        return len(self._works)

    def add(self, work: _ManagedWork) -> None:
        """A collective has begun."""
        self._works.append(work)

    def keep_error(self, e: Exception) -> None:
        """The step is spoiled. What came first is the cause."""
        if self.error is None:
            self.error = ExceptionWithTraceback(e)

    def running(self) -> Optional[int]:
        """The number of the first collective that has not ended, None if all have."""
        return next((i for i, work in enumerate(self._works) if not work.ended()), None)

    def abort(self) -> None:
        """Aborts the process group, once a step. The next quorum has a new id, as this step is not committed."""
        if self.aborted:
            return
        self.aborted = True
        try:
            self._abort()
        except Exception as e:
            self._logger().exception(f"the process group could not be aborted: {e}")

    def wait(self) -> None:
        """Waits for the collectives that nobody waited for; most have ended long ago."""
        for work in self._works:
            work.wait()

    def end(self) -> bool:
        """As :meth:`wait`; and after an abort for the real end of those that were in flight: they must not write into
        memory that the next step uses.

        Returns:
            False if one of them has still not ended.
        """
        self.wait()
        works, self._works = self._works, []
        if not self.aborted:
            return True
        deadline = time.monotonic() + _DRAIN_SEC
        left = [work for work in works if not work.drain(timedelta(seconds=max(0.0, deadline - time.monotonic())))]
        if self._at_once is not None:
            self._left += left
        return not left

    def make_room(self, timeout: timedelta) -> None:
        """Waits until a thread of the backend is free for the next peers.

        Raises:
            TimeoutError: none is free in that time.
        """
        if self._at_once is None or self._lost() < self._at_once:
            return
        self._logger().warn(
            f"{len(self._left)} collectives of an earlier quorum, which the backend lost, hold its {self._at_once} "
            "threads until their timeout: this group joins no quorum before"
        )
        deadline = time.monotonic() + timeout.total_seconds()
        while self._lost() >= self._at_once:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"collectives that the backend lost hold all of its {self._at_once} threads for more than {timeout}"
                )
            time.sleep(min(left, _LOOK_SEC))

    def _lost(self) -> int:
        """How many of earlier steps the backend is still not through with."""
        self._left = [work for work in self._left if not work.drain(timedelta(0))]
        return len(self._left)
