"""The collectives of one step, and those of earlier steps that still run in the backend after an abort.

On a device a collective has ended when the device has finished it. Whoever waits for one only queues what comes after:
then its mark stays here until the vote, and its tensors do not.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Callable, Optional, Union

import torch
from torch.distributed import ReduceOp

from torchft.collectives import check_quantizable
from torchft.utils import Mark, poll, refuse_capture

if TYPE_CHECKING:
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.state import Place
    from torchft._manager.work import _ManagedWork

# How long the aborted collectives of a step may take to end. Gloo's take some 10 ms; but in one of a hundred failures
# it forgets a send, which then waits for its own timeout.
_DRAIN_SEC = 0.5
# How often it is looked whether one that was forgotten is over.
_LOOK_SEC = 0.01


def check_reducible(tensor: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool) -> None:
    """Refuses arguments of ``Manager.allreduce``.

    Raises:
        ValueError: the dtype does not go with the reduction.
        RuntimeError: the current stream is captured into a graph.
    """
    if not tensor.is_cpu:
        refuse_capture("Manager.allreduce")
    if should_quantize:
        check_quantizable(tensor, reduce_op)
    if reduce_op == ReduceOp.AVG and not tensor.dtype.is_floating_point:
        raise ValueError(f"reduce_op=AVG needs a floating point tensor, this one is {tensor.dtype}; use SUM")


class Collectives:
    """What runs in a step, and whether it is of use.

    Args:
        abort: aborts the process group.
        report: learns of a collective that failed, and whose it is: these.
        backlog: takes those that the backend is not through with.
        place: where the rank is; the timeout of each.
        logger: of the Manager.

    Attributes:
        usable: whether more of them make sense. A failed heal spoils the step of its group, but its peers still count
            on it in their collectives.
        aborted: whether the process group was aborted in this step.
    """

    def __init__(
        self,
        abort: Callable[[], None],
        report: Callable[[Exception, Collectives], None],
        backlog: Backlog,
        place: Place,
        logger: _ManagerLogger,
    ) -> None:
        self._abort = abort
        self._report = report
        self._backlog = backlog
        self._place = place
        self._logger = logger
        self.usable = True
        self.aborted = False
        self._aborting = threading.Lock()  # held by an abort that goes on
        self._retired = False
        self._begun = 0
        # Those that have not ended, by number: failed ones, those nobody waited for, and what a device has to reach.
        self._flights: dict[int, Union[_ManagedWork, Mark]] = {}

    def __len__(self) -> int:
        return self._begun

    @property
    def _timeout(self) -> timedelta:
        """Read by name: see _ManagedWork."""
        return self._place.timeout

    def add(self, work: _ManagedWork) -> None:
        """A collective has begun."""
        self._flights[self._begun] = work
        work.belongs_to(self._flights, self._begun)
        self._begun += 1

    def report_error(self, e: Exception) -> None:
        """One of them failed."""
        self._report(e, self)

    def running(self) -> Optional[int]:
        """The number of the first collective that has not ended, None if all have."""
        for number, flight in list(self._flights.items()):
            if not (flight.reached() if isinstance(flight, Mark) else flight.over()):
                return number
        return None

    def abort(self) -> None:
        """Aborts the process group, once a step. The next quorum has a new id, as this step is not committed.

        Returns at once where another thread does: an abort may wait for what that one holds.
        """
        if self.aborted or self._retired or not self._aborting.acquire(blocking=False):
            return
        try:
            if self.aborted or self._retired:
                return
            self.aborted = True
            self._abort()
        except Exception as e:
            self._logger.exception(f"the process group could not be aborted: {e}")
        finally:
            self._aborting.release()

    def retire(self) -> None:
        """The next step begins: what fails late aborts nothing any more. Returns when no abort goes on."""
        with self._aborting:
            self._retired = True

    def wait(self) -> None:
        """Waits for the collectives that nobody waited for; most have ended long ago."""
        for flight in list(self._flights.values()):
            if not isinstance(flight, Mark):
                flight.wait()

    def end(self, timeout: timedelta) -> bool:
        """As :meth:`wait`, and until devices have finished; and after an abort for the real end of those that were in
        flight: they must not write into memory that the next step uses.

        Args:
            timeout: after which a device is given up, and the process group aborted.

        Returns:
            False if one of them has still not ended.
        """
        self.wait()
        marks = [flight for flight in self._flights.values() if isinstance(flight, Mark)]
        if marks:
            self._await_devices(marks, timeout)
        flights, self._flights = self._flights, {}
        if not self.aborted:
            return True
        deadline = time.monotonic() + _DRAIN_SEC
        works = [flight for flight in flights.values() if not isinstance(flight, Mark)]
        left = [work for work in works if not work.drain(timedelta(seconds=max(0.0, deadline - time.monotonic())))]
        self._backlog.add(left)
        return not left and all(_waited(mark, deadline - time.monotonic()) for mark in marks)

    def _await_devices(self, marks: list[Mark], timeout: timedelta) -> None:
        """Until then the collectives are in flight: a failure that is told ends them."""
        try:
            ended = poll(lambda: self.aborted or all(mark.reached() for mark in marks), timeout.total_seconds())
        except Exception as e:  # the device has failed
            self.report_error(e)
            return
        if not ended:
            self.report_error(
                TimeoutError(
                    f"timed out: the device did not finish the collectives of the step within "
                    f"{timeout.total_seconds()} s"
                )
            )


class Backlog:
    """Collectives of earlier steps that were aborted, and are not over in the backend.

    Args:
        at_once: how many collectives hold all threads of the process group, also for its next peers; None: new peers
            come with new threads.
        logger: of the Manager.
    """

    def __init__(self, at_once: Optional[int], logger: _ManagerLogger) -> None:
        self._at_once = at_once
        self._logger = logger
        self._left: list[_ManagedWork] = []

    def add(self, left: list[_ManagedWork]) -> None:
        """The step that they belong to ends without them."""
        if self._at_once is not None:
            self._left += left

    def make_room(self, timeout: timedelta) -> None:
        """Waits until a thread of the backend is free for the next peers.

        Raises:
            TimeoutError: none is free in that time.
        """
        if self._at_once is None or self._lost() < self._at_once:
            return
        self._logger.warn(
            f"{len(self._left)} collectives of an earlier quorum, which the backend lost, hold its {self._at_once} "
            "threads until their timeout: this group joins no quorum before"
        )
        deadline = time.monotonic() + timeout.total_seconds()
        while self._lost() >= self._at_once:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"timed out: collectives that the backend lost hold all of its {self._at_once} threads "
                    f"for more than {timeout}"
                )
            time.sleep(min(left, _LOOK_SEC))

    def _lost(self) -> int:
        """How many of earlier steps the backend is still not through with."""
        self._left = [work for work in self._left if not work.drain(timedelta(0))]
        return len(self._left)


def _waited(mark: Mark, timeout: float) -> bool:
    try:
        return mark.wait(max(0.0, timeout))
    except RuntimeError:  # a device that has failed writes nothing any more
        return True
