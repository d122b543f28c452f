"""The collectives of one step, and the aborted collectives of earlier steps that the backend has not ended.

On a device a collective has ended when the device has finished it, but `wait` only orders the current stream
behind it. So a `wait` leaves an event on that stream (a :class:`DeviceEvent`) here until the vote. The
tensors are not kept: the training loop may free them.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Callable, Optional, Union

import torch
from torch.distributed import ReduceOp

from torchft.collectives import check_quantizable
from torchft.utils import DeviceEvent, poll, refuse_capture
from torchft.work import AnyReduceOp

if TYPE_CHECKING:
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.rank import RankState
    from torchft._manager.step.work import _ManagedWork

# The most seconds for which a step waits until its aborted collectives no longer write. Those of Gloo mostly
# end within some 10 ms. In one of a hundred failures Gloo never wakes a send. Such a collective no longer
# writes once the threads of Gloo sleep (see quiescence.py); with PyTorch 2.7 that cannot be detected, and the
# send lasts until its own timeout.
_DRAIN_SEC = 0.5
# The interval at which such collectives are polled.
_LOOK_SEC = 0.01


def check_reducible(tensor: torch.Tensor, reduce_op: AnyReduceOp, should_quantize: bool) -> None:
    """Refuses arguments of ``Manager.allreduce``.

    Raises:
        ValueError: the dtype does not fit the reduction.
        RuntimeError: the current stream is captured into a CUDA graph.
    """
    if not tensor.is_cpu:
        refuse_capture("Manager.allreduce")
    if should_quantize:
        check_quantizable(tensor, reduce_op)
    if reduce_op == ReduceOp.AVG and not tensor.dtype.is_floating_point:
        raise ValueError(f"reduce_op=AVG needs a floating point tensor, this one is {tensor.dtype}; use SUM")


class Collectives:
    """The collectives of one step. `report`: called with the error of a failed one and with this object.

    Attributes:
        usable: whether the step may run further collectives. True also after a failed heal: the step is then
            not committed here, but the peers' collectives need this group.
        aborted: whether the process group was aborted in this step.
    """

    def __init__(
        self,
        abort: Callable[[], None],
        report: Callable[[Exception, Collectives], None],
        backlog: Backlog,
        rank_state: RankState,
        logger: _ManagerLogger,
    ) -> None:
        self._abort = abort
        self._report = report
        self._backlog = backlog
        self._rank_state = rank_state
        self._logger = logger
        self.usable = True
        self.aborted = False
        self._aborting = threading.Lock()  # held during an abort
        self._retired = False
        self._begun = 0
        # By number: collectives that failed or that the training loop has not waited for, and events that the
        # device has not reached.
        self._flights: dict[int, Union[_ManagedWork, DeviceEvent]] = {}

    def __len__(self) -> int:
        return self._begun

    @property
    def _timeout(self) -> timedelta:
        """The timeout, under the name by which _ManagedWork reads it from a Manager."""
        return self._rank_state.timeout

    def add(self, work: _ManagedWork) -> None:
        self._flights[self._begun] = work
        work.flights, work.number = self._flights, self._begun
        self._begun += 1

    def report_error(self, e: Exception) -> None:
        self._report(e, self)

    def running(self) -> Optional[int]:
        """The number of the first collective that has not ended, None if all have."""
        for number, flight in list(self._flights.items()):
            if not (flight.reached() if isinstance(flight, DeviceEvent) else flight.over()):
                return number
        return None

    def abort(self) -> None:
        """Aborts the process group, at most once in a step. That is safe because the step is then not
        committed, so the next quorum has a new id and reconfigures the group.

        Returns at once if another thread is in an abort: that thread may wait for a lock that this thread
        holds.
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
        """Makes late failures of this step's collectives abort nothing. Waits for an abort in progress."""
        with self._aborting:
            self._retired = True

    def wait(self) -> None:
        """Waits for the collectives that the training loop has not waited for; most have ended."""
        for flight in list(self._flights.values()):
            if not isinstance(flight, DeviceEvent):
                flight.wait()

    def end(self, timeout: timedelta) -> bool:
        """Does the same as :meth:`wait`, then waits until devices have finished, and after an abort until the
        backend has ended the operations that were in flight: before that they may write into memory that the
        next step uses. Returns False if one has still not ended.

        Args:
            timeout: limit for the devices; when it expires, the process group is aborted.
        """
        self.wait()
        marks = [flight for flight in self._flights.values() if isinstance(flight, DeviceEvent)]
        if marks:
            self._await_devices(marks, timeout)
        flights, self._flights = self._flights, {}
        if not self.aborted:
            return True
        deadline = time.monotonic() + _DRAIN_SEC
        works = [flight for flight in flights.values() if not isinstance(flight, DeviceEvent)]
        left = [
            work for work in works if not work.drain(timedelta(seconds=max(0.0, deadline - time.monotonic())))
        ]
        # A sleeping one still occupies a thread.
        self._backlog.add([work for work in works if not work.ended()])
        return not left and all(_waited(mark, deadline - time.monotonic()) for mark in marks)

    def _await_devices(self, marks: list[DeviceEvent], timeout: timedelta) -> None:
        """Waits until devices have reached the marks, or a reported failure has aborted the collectives.

        A poll asks for the last mark that was not reached: mostly it is behind all others on one stream.
        """
        left = [*marks]

        def ended_all() -> bool:
            while left and left[-1].reached():
                left.pop()
            return self.aborted or not left

        try:
            ended = poll(ended_all, timeout.total_seconds())
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
    """Collectives of earlier steps that were aborted, but have not ended in the backend. `at_once`: the
    number of threads that the process group has for collectives and keeps when its peers change; None if a
    group with new peers has new threads.
    """

    def __init__(self, at_once: Optional[int], logger: _ManagerLogger) -> None:
        self._at_once = at_once
        self._logger = logger
        self._left: list[_ManagedWork] = []

    def add(self, left: list[_ManagedWork]) -> None:
        if self._at_once is not None:
            self._left += left

    def make_room(self, timeout: timedelta) -> None:
        """Waits until a thread of the backend is free for the next peers. TimeoutError: none is in time."""
        if self._at_once is None or self._occupied() < self._at_once:
            return
        self._logger.warn(
            f"{len(self._left)} aborted collectives of an earlier quorum occupy the {self._at_once} threads "
            "of the backend until their timeout: this group joins no quorum before"
        )
        deadline = time.monotonic() + timeout.total_seconds()
        while self._occupied() >= self._at_once:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"timed out: aborted collectives occupy all {self._at_once} threads of the backend "
                    f"for more than {timeout}"
                )
            time.sleep(min(left, _LOOK_SEC))

    def _occupied(self) -> int:
        """The number of collectives of earlier steps that still occupy a thread."""
        self._left = [work for work in self._left if not work.ended()]
        return len(self._left)


def _waited(mark: DeviceEvent, timeout: float) -> bool:
    try:
        return mark.wait(max(0.0, timeout))
    except RuntimeError:  # the device has failed, so it writes nothing any more
        return True
