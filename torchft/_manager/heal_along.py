"""The heals of one rank with ``heal_along``, as source and as target: pieces are sent while all groups train.

This module decides whether a heal can be done in pieces. If not, the state is transferred as a whole, and the log says
why. giving.py implements the source, joining.py the target.
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
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.plan import Plan


class StillHealing(RuntimeError):
    """The step is not committed because not all of the state of a peer has arrived. It is no failure."""


class Along:
    """Heals of one rank, as source and as target.

    Args:
        transport: the transport, whose ``offer_pieces`` serves the pieces.
        optimizers: their parameters, with optimizer state, are healed in pieces. More may be added to this sequence.
        locate: given the address of a group's manager server, returns where the same rank of that group offers its
            state.
        refuses: returns why a group cannot train along while it heals; None if it can.
        ranks: the ranks of this group, which all end a heal in the same step.
        timeout: timeout of a request in seconds; a request may wait for the source's next step.
        additional: the most additional sources from which a target requests pieces.
        logger: the Manager's logger.
        chooses: whether a heal in pieces ends, and the state is transferred as a whole, if that loses less time.

    Attributes:
        began: when the present heal began, by time.monotonic().
        wrote: whether heals that have ended, or the present one until its last vote, have changed weights since a
            state was loaded.
    """

    began = 0.0
    wrote = False

    def __init__(
        self,
        transport: Transport,
        optimizers: Sequence[Optimizer],
        locate: Locate,
        refuses: Callable[[], Optional[str]],
        ranks: Ranks,
        timeout: float,
        additional: int,
        logger: _ManagerLogger,
        chooses: bool = False,
    ) -> None:
        self._transport = transport
        self._chooses = chooses
        self._optimizers = optimizers
        self._refuses = refuses
        self._ranks = ranks
        self._logger = logger
        self._make_target = partial(Target, locate=locate, timeout=timeout, additional=additional, logger=logger)
        self._prepared: Optional[Parameters] = None
        self._target: Optional[Target] = None
        self._abandoned = False  # until the next heal
        self._head: Any = None  # the announced head of the present step; None: no group heals, or none in pieces
        if transport.gives_pieces:
            transport.prepare_pieces()

    def prepare(self) -> None:
        """Called before this group requests its first quorum: later, all groups would wait for this work."""
        self._prepared = None
        if self._refuses() is not None:
            return
        parameters = Parameters(self._optimizers)
        try:
            parameters.check()
            parameters.prepare()
        except Exception as e:
            self._logger.info(f"the optimizers are not prepared for a heal: {e}")
        else:
            self._prepared = parameters

    def _take_prepared(self) -> Optional[Parameters]:
        """Returns the parameters of the last :meth:`prepare`: at the first call only, and unless the optimizers have
        changed since. Otherwise None.
        """
        parameters, self._prepared = self._prepared, None
        try:
            if parameters is not None:
                parameters.check()
                parameters.check_groups()
                parameters.beside.mark()
        except Unfit:
            return None
        return parameters

    def follow(self, plan: Plan) -> None:
        """Called for each quorum. Each up-to-date group announces the step to targets: it may be the next source."""
        if not plan.heal:
            self.stop()
            self._prepared = None
        self._head = None
        serves = plan.up_to_date and plan.num_up_to_date < plan.replica_world_size and plan.max_step > 0
        if serves and self._transport.gives_pieces:
            reason = self._refuses()
            self._head = head(self._optimizers) if reason is None else {"unfit": reason}
            self._transport.note_step(plan.max_step, self._head)

    def decided(self, plan: Plan, committed: bool) -> None:
        """Called when this group has decided on a step; targets can request the decision."""
        if self._gives:
            self._transport.note_decision(plan.max_step, plan.quorum_id, committed)

    @property
    def _gives(self) -> bool:
        """Whether this group offers the state of the present step in pieces."""
        return self._head is not None and "unfit" not in self._head

    def offer(self, plan: Plan, read: ReadState, whole: Callable[[], None]) -> bool:
        """Offers the state of a step in pieces.

        Args:
            plan: the plan of the quorum.
            read: returns the state of this step, on any thread.
            whole: offers the whole state, on another thread; called if a target requests it.

        Returns:
            False if this group offers its state only as a whole. The head that :meth:`follow` announced has the reason.
        """
        if not self._gives:
            return False
        self._transport.offer_pieces(plan.max_step, Giver(self._optimizers, read, whole))
        return True

    def join(self, plan: Plan, may_write: bool) -> bool:
        """Begins or continues a heal in pieces. Returns False if this group needs the whole state at once.

        Args:
            plan: the plan of a quorum in which this group heals.
            may_write: whether the heal may overwrite this group's own weights, which are lost if it fails.
        """
        prepared = self._take_prepared()
        if plan.max_step == 0:
            return False
        progress = self._ranks.group_progress(plan.max_step)
        if progress is Progress.WHOLE and not self._abandoned:
            self._abandon("another rank of this group needs the whole state", plan.max_step)
        if self._abandoned:
            self._report(plan.max_step, Progress.WHOLE)
            return False
        target = self._target  # read once: a shutdown on another thread clears it
        if target is None:
            parameters = prepared or Parameters(self._optimizers)
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
            self._target = target = self._make_target(parameters)
        target.quorum(plan, together=progress is Progress.READY)
        if self._chooses and (reason := target.why_at_once()) is not None:
            self._abandon(reason, plan.max_step)
            return False
        return True

    @property
    def joining(self) -> bool:
        """Whether a heal in pieces is in progress, so that this group trains along."""
        return self._target is not None

    def advance(self, reduced: bool) -> Optional[dict[str, Any]]:
        """Ends a step of a group that trains along, on the training thread, before it votes.

        Args:
            reduced: whether all of the step's reductions have succeeded.

        Returns:
            The complete state of the step; None while parts of it are missing.
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
        """Called by the training thread when it reduces a tensor."""
        target = self._target
        if target is not None:
            target.pace.reduces(time.monotonic())

    def peer_failed(self, quorum_id: int, replica_id: str) -> None:
        """Called on any thread when a group of a quorum is reported to have failed."""
        target = self._target
        if target is not None:
            target.peer_failed(quorum_id, replica_id)

    def how_far(self) -> str:
        """The progress of the heal, as text for logs and errors."""
        target = self._target
        return target.how_far() if target is not None else "the state of a peer is transferred as a whole"

    def healed(self) -> None:
        """Called when a state was loaded: the next heal may be in pieces."""
        self._abandoned = self.wrote = False
        target = self._target
        if target is not None:
            target.wrote = False

    def stop(self) -> None:
        """Ends the heal in pieces, and its request thread."""
        target, self._target = self._target, None
        if target is not None:
            target.stop()
            self.wrote = self.wrote or target.wrote  # also what the request thread wrote after the last vote
