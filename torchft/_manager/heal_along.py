"""The heals of one rank with ``heal_along``, as a source and as a target: state in pieces, while all groups train.

This module decides whether a heal can be in pieces. If not, the state is transferred as a whole, and the log says why.
giving.py is the source's part, joining.py the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

from torchft._manager.giving import Giver, ReadState, head
from torchft._manager.joining import Locate, Target
from torchft._manager.together import Progress, Ranks
from torchft._manager.tracked import Parameters, Unfit

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.edge import Transport
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.plan import Plan


class StillHealing(RuntimeError):
    """A step that is not committed because the state of a peer has not come. It is no failure."""


class Along:
    """Heals of one rank, as source and as target.

    Args:
        transport: whose ``offer_pieces`` carries pieces.
        optimizers: whose parameters, and state of them, are healed piece by piece. More may be added.
        read: gives the state that a heal carries.
        locate: gives where the rank's counterpart in a group, by the address of its manager server, offers its state.
        refuses: why the groups cannot train along while they heal; None: they can.
        ranks: of this group, which end a heal in one step.
        timeout: of a request, in seconds: one may wait for the next step of its source.
        additional: sources that a target asks beside the assigned one, at most.
        logger: of the Manager.

    Attributes:
        began: when the heal began that goes on, by time.monotonic().
        wrote: whether that heal, or the last one, has changed weights.
    """

    began = 0.0
    wrote = False

    def __init__(
        self,
        transport: Transport,
        optimizers: Sequence[Optimizer],
        read: ReadState,
        locate: Locate,
        refuses: Callable[[], Optional[str]],
        ranks: Ranks,
        timeout: float,
        additional: int,
        logger: _ManagerLogger,
    ) -> None:
        self._transport = transport
        self._optimizers = optimizers
        self._read = read
        self._refuses = refuses
        self._ranks = ranks
        self._logger = logger
        self._make_target = partial(Target, locate=locate, timeout=timeout, additional=additional, logger=logger)
        self._target: Optional[Target] = None
        self._abandoned = False  # until the next heal
        if transport.gives_pieces:
            transport.prepare_pieces()

    def follow(self, plan: Plan) -> None:
        """A quorum. All groups that are up to date note its step for the others: each may be the next source."""
        if not plan.heal:
            self.stop()
        if plan.up_to_date and plan.num_up_to_date < plan.replica_world_size and self._can(plan):
            self._transport.note_step(plan.max_step, head(self._optimizers))

    def decided(self, plan: Plan, committed: bool) -> None:
        """This group has decided on a step."""
        if plan.up_to_date and plan.num_up_to_date < plan.replica_world_size and self._can(plan):
            self._transport.note_decision(plan.max_step, plan.quorum_id, committed)

    def _can(self, plan: Plan) -> bool:
        return plan.max_step > 0 and plan.in_background and self._refuses() is None

    def offer(self, plan: Plan, whole: Callable[[], None]) -> bool:
        """Gives the state of a step in pieces; ``whole`` offers it all, on another thread, if a target asks for it.
        False: this group gives its state as a whole only, and :meth:`follow` said why.
        """
        if not self._can(plan) or "unfit" in head(self._optimizers):
            return False
        self._transport.offer_pieces(plan.max_step, Giver(self._optimizers, self._read, whole))
        return True

    def join(self, plan: Plan, may_write: bool) -> bool:
        """Follows a quorum in which this group heals. False: it needs the whole state at once.

        Args:
            plan: of the quorum.
            may_write: whether the group's own weights may be lost if the heal does not get to its end.
        """
        if plan.max_step == 0:
            return False
        progress = self._ranks.group_progress(plan.max_step)
        if progress is Progress.WHOLE and not self._abandoned:
            self._abandon("another rank of this group takes it over so", plan.max_step)
        if self._abandoned:
            self._report(plan.max_step, Progress.WHOLE)
            return False
        if self._target is None:
            parameters = Parameters(self._optimizers)
            try:
                if reason := self._refuses():
                    raise Unfit(reason)
                if not may_write:
                    raise Unfit("one group alone has it: if that failed, this group would go on with its own weights")
                parameters.check()
            except Unfit as e:
                self._abandon(str(e), plan.max_step)
                return False
            self.began = time.monotonic()
            self.wrote = False
            self._target = self._make_target(parameters)
        self._target.quorum(plan, together=progress is Progress.READY)
        return True

    @property
    def joining(self) -> bool:
        """Whether this group trains along."""
        return self._target is not None

    def advance(self, reduced: bool) -> Optional[dict[str, Any]]:
        """Ends a step of a group that trains along, on the training thread, before it votes.

        Args:
            reduced: whether all of the step's reductions have succeeded.

        Returns:
            The state of the step, once all of it is here.
        """
        target = self._target
        if target is None:
            return None
        try:
            state = target.advance(reduced)
        except Exception as e:
            target.abandon(str(e) if isinstance(e, Unfit) else repr(e))
            state = None
        self.wrote = self.wrote or target.wrote
        assert target.heal.step is not None
        if target.heal.abandoned is not None:
            self._abandon(target.heal.abandoned, target.heal.step)
        elif target.heal.unverified == 0:
            self._report(target.heal.step, Progress.READY)
        return state

    def _report(self, step: int, progress: Progress) -> None:
        try:
            self._ranks.report(step, progress)
        except Exception as e:
            self._logger.warn(f"the other ranks of the group do not know how far the heal of this one is: {e}")

    def _abandon(self, reason: str, step: int) -> None:
        self.stop()
        self._abandoned = True
        self._report(step, Progress.WHOLE)
        self._logger.warn(f"the state is transferred as a whole, and the other groups wait for it: {reason}")

    def reduces(self) -> None:
        """The training thread reduces a tensor."""
        target = self._target
        if target is not None:
            target.pace.reduces(time.monotonic())

    def peer_failed(self, quorum_id: int, replica_id: str) -> None:
        """A group of a quorum is reported to have failed. On any thread."""
        target = self._target
        if target is not None:
            target.peer_failed(quorum_id, replica_id)

    def how_far(self) -> str:
        """For the log."""
        return self._target.how_far() if self._target is not None else "the state of a peer is transferred as a whole"

    def healed(self) -> None:
        """A state was loaded: the next heal may be piece by piece."""
        self._abandoned = False

    def stop(self) -> None:
        """Ends the thread that asks."""
        target, self._target = self._target, None
        if target is not None:
            target.stop()
