"""Errors of the current step: decides which of them is kept, and which collectives an error ends."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Optional, TypeVar

import torch

from torchft._manager.observe.phases import Incident
from torchft._manager.step.failures import PeerFailed

if TYPE_CHECKING:
    from torchft._manager.edge import GroupServer
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.rank import RankState
    from torchft._manager.step.collectives import Collectives
    from torchft._manager.step.step import Step

T = TypeVar("T")


class ExceptionWithTraceback(Exception):
    """An exception with its traceback as text, so that another thread can show where it was raised."""

    def __init__(self, e: Exception) -> None:
        super().__init__(e)
        self.original_exception = e
        self.stack_trace: str = "".join(traceback.format_exception(type(e), e, e.__traceback__))

    def __str__(self) -> str:
        return f"{self.original_exception}\n{self.stack_trace}"


class Errors:
    """Handles the errors of a rank's steps, on any thread. After an error the group does not commit the step.

    Args:
        server: gets the report of a failed collective.

    Attributes:
        step: the step in progress; set before the first error.
        incident: measures what an error costs, until the next commit; None: there was none.
    """

    step: Step
    incident: Optional[Incident] = None

    def __init__(
        self, replica_id: str, rank_state: RankState, server: GroupServer, logger: _ManagerLogger
    ) -> None:
        self._replica_id = replica_id
        self._rank_state = rank_state
        self._server = server
        self._logger = logger

    def keep(self, e: Exception, step: Optional[Step] = None) -> None:
        """Keeps an error of a heal. The step's further collectives run nevertheless, because the peers need
        this rank in them. `step`: step of the error; default: the step in progress.
        """
        (step or self.step).failed(e)
        if self.incident is None:
            self.incident = Incident(str(e), self._rank_state.step, self._rank_state.quorum_id)
        self._logger.error_event(e)

    def phase_ended(self, phase: str) -> None:
        """A phase of the incident has ended, on any thread."""
        incident = self.incident  # read once: the training thread may end it
        if incident is not None:
            incident.ended(phase)

    def lose(self, e: Exception, step: Optional[Step] = None) -> None:
        """Keeps an error while no peer waits for this rank. The step's further collectives are skipped."""
        step = step or self.step
        step.collectives.usable = False
        self.keep(e, step)

    def of_loop(self, e: Exception, step: Optional[Step] = None) -> None:
        """Keeps an error of the training loop, and aborts the process group: this rank votes no, and may
        reduce nothing more in this step, for which the peers would wait. The step is not replayed, because
        the error would recur.
        """
        step = step or self.step
        step.inputs.refuse(f"the training loop reported an error: {e}")
        self.lose(e, step)
        step.abort()
        self.phase_ended("abort")

    def recurring(self, e: Exception, reason: str) -> None:
        """Keeps an error while no peer waits for this rank. It would recur in a replay: ``reason``."""
        self.refuse_replay(reason)
        self.lose(e)

    def refuse_replay(self, reason: str) -> None:
        """Declares that the step does something that cannot be repeated, so that it is not replayed."""
        self.step.inputs.refuse(reason)

    def of_collective(self, e: Exception, of: Optional[Collectives] = None) -> None:
        """Keeps an error of a collective, and aborts the process group, so that no peer waits for the rest of
        this quorum's collectives.

        Only the neighbors of a failed group see its connection break. Their abort lets the others see it
        too.

        Args:
            of: the collectives of the step in which the error occurred; default: the current step. A late
                failure of an earlier step is only logged: an abort would end the current collectives, whose
                peers differ.
        """
        step = self.step  # read once: the training thread may begin the next step in the meantime
        if of is not None and of is not step.collectives:
            self._logger.warn(f"a collective of an earlier step failed: {e!r}")
            return
        if not _peers_fault(e):
            step.inputs.refuse(f"a collective cannot be done: {e!r}")
        elif not step.collectives.aborted and not isinstance(e, PeerFailed) and step.plan:
            self._server.suspect(step.plan.quorum_id, [i for i in step.peers if i != self._replica_id])
        self._end_collectives(e, step)

    def of_this_rank(self, e: Exception) -> None:
        """Keeps an error of this rank or its group while peers wait for it, and aborts the process group.

        No peer is suspected, whatever the type of the error. Each member has one report a quorum, and a wrong
        one would let the lighthouse check on healthy peers, which it evicts if it does not reach them.
        """
        step = self.step
        step.inputs.refuse(f"this rank had an error: {e!r}")
        self._end_collectives(e, step)

    def _end_collectives(self, e: Exception, step: Step) -> None:
        self.lose(e, step)
        step.collectives.abort()
        self.phase_ended("abort")

    def swallow(self, future: torch.futures.Future[T], default: T) -> torch.futures.Future[T]:
        """Returns a future that has the value ``default`` if the given one fails.

        The error counts for the step in progress, including its replays; in a later step it is only logged.
        """
        inputs = self.step.inputs

        def value_or_default(done: torch.futures.Future[T]) -> T:
            try:
                return done.value()
            except Exception as e:
                self._logger.exception(f"a future failed: {e}")
                step = self.step  # read once: the training thread may begin the next step in the meantime
                if step.inputs is inputs:
                    self.of_loop(e, step)
                return default

        return future.then(value_or_default)


def _peers_fault(error: Exception) -> bool:
    """Whether an error of a collective can be due to its peers; others would recur in a replay."""
    return isinstance(error, (RuntimeError, OSError, EOFError)) and not isinstance(error, NotImplementedError)
