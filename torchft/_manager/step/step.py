"""One step of one rank: its data, and how it ends.

``start_quorum`` and each attempt of a replay create a :class:`Step`. The Manager keeps it until the next one
begins: until then the training loop may query its outcome, and reduce other tensors, such as a loss for the
log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from torchft._manager.step.errors import ExceptionWithTraceback
from torchft._manager.step.inputs import Inputs
from torchft._manager.step.sharing import SharedStep

if TYPE_CHECKING:
    import torch

    from torchft._manager.quorum.plan import Plan
    from torchft._manager.step.collectives import Collectives


class StepOutcome(Enum):
    """How a step ended."""

    COMMITTED = "committed"
    LOST = "lost"
    DROPPED = "dropped for the next one, before the group decided on it"


class StepRequest(NamedTuple):
    """The arguments of ``start_quorum``."""

    allow_heal: bool
    shrink_only: bool
    timeout: timedelta

    def is_like(self, other: StepRequest) -> bool:
        """Whether both request the same quorum; their timeouts may differ."""
        return self[:2] == other[:2]


class Step:
    """One attempt at a step.

    Args:
        request: the request for its quorum.
        collectives: the collectives that it begins.
        copies: buffers for copies of what the collectives reduce.
        attempted: the attempt before, whose inputs and optimizers it shares; None: it is the first one.
        plan: the plan of the previous step; None if there was none.

    Attributes:
        plan: the plan of its quorum; until the quorum is known, the plan of the previous step.
        participating_rank: this group's rank among the participants; None: it contributes zeros.
        participants: number of participating groups.
        kept: the inputs of its reductions, of this attempt and those before; None: there are none.
        peers: replica ids of the groups that it reduces with, this one among them.
        began: time.monotonic() at the start.
        thread: the training thread.
        healing: whether this group contributes zeros, because it heals.
        error: the first error; None if there is none.
        outcome: how it ended; None: it has not.
        deferred: the plan whose transfers the training thread has to begin when it waits for the quorum,
            because the user's functions run on no other thread; None: there are none.
        sharing: the optimizers that step in it.
        unit: indices of the samples that the training thread has taken of an ElasticDataLoader last; None: it
            has taken none.
        skip: a name of this unit, if all groups are to leave it out when it ends two of them; else empty.
        reads_state: whether the training thread waits for the answer when the step begins, and fills
            :attr:`served`.
    """

    deferred: Optional[Plan] = None
    reads_state = False
    unit: Optional[Sequence[int]] = None
    skip: str = ""
    _served: Optional[Future[dict[str, Any]]] = None

    def __init__(
        self,
        request: StepRequest,
        collectives: Collectives,
        copies: list[torch.Tensor],
        plan: Optional[Plan],
        attempted: Optional[Step] = None,
    ) -> None:
        self.request = request
        self.collectives = collectives
        self._copies = copies
        self.kept: Optional[Inputs] = None if attempted is None else attempted.inputs
        self._take(plan)
        self.began = time.monotonic()
        self.thread = threading.get_ident()
        self.healing = False
        self._has_state = True  # False: a heal has not loaded a peer's state yet
        self.sharing = SharedStep() if attempted is None else attempted.sharing
        self.error: Optional[ExceptionWithTraceback] = None
        self._enough = True
        self._voted = False
        self.outcome: Optional[StepOutcome] = None
        # An error may come on any thread, and counts if this rank has not voted yet.
        self._lock = threading.Lock()
        # Each is set before the other is read: whichever comes second aborts.
        self._connected = self._aborts = False

    @property
    def served(self) -> Future[dict[str, Any]]:
        """The state that this group serves: the training thread reads it, another one may wait for it."""
        with self._lock:
            if self._served is None:
                self._served = Future()
            return self._served

    @property
    def inputs(self) -> Inputs:
        """The inputs of its reductions, on any thread."""
        with self._lock:
            if self.kept is None:
                self.kept = Inputs(self._copies)
            return self.kept

    def forget_inputs(self) -> None:
        """Forgets the inputs of its reductions when it has ended."""
        if self.kept is not None:
            self.kept.forget()

    def begins_anew(self) -> None:
        """Makes the attempt of a replay, which has only its quorum, one at the next step."""
        self.forget_inputs()
        self.sharing = SharedStep()

    def follow(self, plan: Plan) -> None:
        """Takes over the plan of its quorum."""
        self._take(plan)
        self.healing = plan.heal
        self._has_state = not plan.heal

    def _take(self, plan: Optional[Plan]) -> None:
        self.plan = plan
        self.participating_rank = plan.participating_rank if plan is not None else None
        self.participants = plan.participants if plan is not None else 0
        self.peers: Sequence[str] = plan.replica_ids if plan is not None else ()

    def loaded(self) -> None:
        """Records that a peer's state was loaded."""
        self._has_state = True

    def joined(self) -> None:
        """Lets this group's gradients count: the state was loaded before the step began."""
        self.healing = False

    def failed(self, error: Exception) -> None:
        """Makes this group vote against the step. The first error is kept as the cause."""
        with self._lock:
            if self.error is None:
                self.error = ExceptionWithTraceback(error)

    @property
    def known_error(self) -> Optional[ExceptionWithTraceback]:
        """The first error. Tests of other projects set it, and clear it."""
        return self.error

    @known_error.setter
    def known_error(self, error: Optional[ExceptionWithTraceback]) -> None:
        self.error = error
        self.collectives.usable = error is None

    def connected(self) -> None:
        """Allows aborts: the process group is connected with the peers of this step."""
        self._connected = True
        if self._aborts:
            self.collectives.abort()

    def abort(self) -> None:
        """Ends the collectives of a step that has had an error, so that no peer waits for what this rank does
        not reduce any more: at once, or as soon as it is connected, because an abort must not end the
        connecting. Does nothing after this rank's vote, since the next step may keep the connection.
        """
        with self._lock:
            self._aborts = self.error is not None and not self._voted and self.undecided
        if self._aborts and self._connected:
            self.collectives.abort()

    def vote(self, least: int) -> bool:
        """Returns this rank's vote: never yes after an error, or before a peer's state is loaded. An error
        that comes later does not change it; if the vote is repeated, because it was not answered, this rank
        then votes no. After a decision the vote is on the next step, in the same quorum.

        Args:
            least: minimum number of participants.
        """
        with self._lock:
            self._voted, self.outcome = True, None
            self._enough = self.participants >= least
            return self._enough and self.error is None and self._has_state

    def decided(self, committed: bool) -> None:
        """Records the decision of the group. torchft's own manager server never commits a step that a rank
        voted against (edge.py checks this); the decision of another server is followed, as in upstream.
        """
        self.outcome = StepOutcome.COMMITTED if committed else StepOutcome.LOST

    def dropped(self) -> None:
        """Ends a step on which the group has not decided when the next one begins."""
        self.outcome = StepOutcome.DROPPED

    @property
    def undecided(self) -> bool:
        """Whether the group has not decided on it."""
        return self.outcome is None

    @property
    def committed(self) -> bool:
        """Whether the group has decided to commit it."""
        return self.outcome is StepOutcome.COMMITTED

    @property
    def refused_by_rank(self) -> bool:
        """Whether only the vote of another rank of the group is against the step."""
        return self.cause is None and self._enough

    @property
    def cause(self) -> Optional[Exception]:
        """The first error, as it was raised."""
        return self.error.original_exception if self.error is not None else None

    def why_lost(self) -> str:
        """The reason why the group did not commit the step."""
        if self.cause is not None:
            return str(self.cause)
        return (
            "another rank of the group voted against it"
            if self.refused_by_rank
            else "too few groups took part"
        )


def not_begun(call: str) -> str:
    """The error of a call that belongs to a step, where none has begun."""
    return (
        f"{call}: no step has begun, start_quorum must be called before it; the zero_grad of an optimizer in "
        "torchft.optim.OptimizerWrapper calls it, that of the optimizer inside does not"
    )
