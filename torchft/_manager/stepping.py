"""The methods that a training loop calls during a step: a base class of the Manager, which begins and ends steps."""

from __future__ import annotations

from typing import Optional

from torchft._manager.errors import ExceptionWithTraceback
from torchft._manager.ranges import ranged
from torchft._manager.rounds import Round
from torchft._manager.step import Step


class Stepping:
    """Answers from the step that runs, or was the last.

    Attributes:
        _current: that step.
        _round: in which its quorum is asked for; None before the first.
    """

    _current: Step
    _round: Optional[Round] = None

    # What other projects read by name

    @property
    def _errored(self) -> Optional[ExceptionWithTraceback]:
        return self._current.error

    @property
    def _healing(self) -> bool:
        return self._current.healing

    @property
    def _participating_replica_rank(self) -> Optional[int]:
        return self._current.participating_rank

    @property
    def _participating_replica_world_size(self) -> int:
        return self._current.participants

    # What a training loop may ask

    @ranged("wait_quorum")
    def wait_quorum(self) -> None:
        """Waits until this step's quorum is known, the process group is ready and a heal has arrived.

        Raises:
            RuntimeError: there is no quorum, or start_quorum was not called.
            TimeoutError: there was none in time.
        """
        if self._round is None:
            raise RuntimeError("start_quorum must be called before anything that needs the quorum")
        self._round.result()

    def errored(self) -> Optional[ExceptionWithTraceback]:
        """The first error of this step, None if there is none."""
        return self._current.error

    def participating_rank(self) -> Optional[int]:
        """This group's rank among those that take part in the step, None if it does not. Waits for the quorum, once one
        was asked for.
        """
        if self._round is not None:
            self.wait_quorum()
        return self._current.participating_rank

    def is_participating(self) -> bool:
        """Whether this group's gradients count in this step."""
        return self._current.participating_rank is not None and not self._current.healing

    def num_participants(self) -> int:
        """Groups that take part in the step, 0 before the first. Waits for the quorum, once one was asked for."""
        if self._round is not None:
            self.wait_quorum()
        return self._current.participants

    def num_up_to_date(self) -> int:
        """Groups of this quorum that had the newest state when it formed; the others heal in it. Waits for the quorum.

        All groups of a quorum get the same number: one by which they can decide to leave together.
        """
        self.wait_quorum()
        assert self._current.plan is not None
        return self._current.plan.num_up_to_date

    def _is_draining(self) -> bool:
        """Whether somebody wants this group to leave, and it has ended its last step."""
        step = self._current
        return not step.undecided and step.plan is not None and step.plan.draining
