"""One step of one rank: its data, and its states.

``start_quorum`` and each attempt of a replay create a :class:`Step`. The Manager keeps it until the next one
begins: until then the training loop may query its outcome, and reduce other tensors, such as a loss for the
log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
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


class StepState(Enum):
    """The states of a step."""

    UNASKED = "was not begun"  # the placeholder before the first step
    ASKED = "waits for its quorum"
    TRAINING = "is in its quorum, with weights of its own"
    HEALING = "is in its quorum, and has not loaded a peer's state yet"
    HEALED = "has loaded a peer's state"
    FAILED = "has had an error"
    VOTED_YES = "has this rank's yes"
    VOTED_NO = "has this rank's no"
    COMMITTED = "is committed"
    LOST = "is lost"
    DROPPED = "was dropped for the next one"

    __hash__ = object.__hash__  # Enum's own is written in Python, and would cost 2 µs per step


class Event(Enum):
    """The events of a step, on any thread."""

    QUORUM = "get a quorum in which it does not heal"
    BEHIND = "get a quorum in which it heals"
    LOADED = "load a peer's state"
    JOINED = "take part after a heal"  # the heal ended before the step began
    ERROR = "have an error"
    YES = "get this rank's yes"
    NO = "get this rank's no"
    COMMIT = "be committed"
    LOSE = "be lost"
    DROP = "be dropped for the next one"

    __hash__ = object.__hash__


_RUNNING = (StepState.ASKED, StepState.TRAINING, StepState.HEALING, StepState.HEALED, StepState.FAILED)
_VOTED = (StepState.VOTED_YES, StepState.VOTED_NO)
_DECIDED = (StepState.COMMITTED, StepState.LOST)


def _each(
    states: Iterable[StepState], event: Event, to: Optional[StepState] = None
) -> dict[tuple[StepState, Event], StepState]:
    return {(state, event): to or state for state in states}


# The next state by state and event. Any other combination is a bug of this package or of the manager server.
TRANSITIONS: dict[tuple[StepState, Event], StepState] = {
    # The quorum arrives, once.
    (StepState.ASKED, Event.QUORUM): StepState.TRAINING,
    (StepState.ASKED, Event.BEHIND): StepState.HEALING,
    (StepState.FAILED, Event.QUORUM): StepState.FAILED,
    (StepState.FAILED, Event.BEHIND): StepState.FAILED,
    # A heal. A state that has arrived is loaded even if the step has failed, because the next step needs it.
    (StepState.HEALING, Event.LOADED): StepState.HEALED,
    (StepState.FAILED, Event.LOADED): StepState.FAILED,
    (StepState.HEALED, Event.JOINED): StepState.TRAINING,
    (StepState.FAILED, Event.JOINED): StepState.FAILED,
    # Errors. One after this rank's vote changes nothing.
    **_each(_RUNNING, Event.ERROR, StepState.FAILED),
    **_each((StepState.UNASKED, *_VOTED, *_DECIDED, StepState.DROPPED), Event.ERROR),
    # This rank's vote: never yes after an error, or before a peer's state is loaded.
    **_each((StepState.TRAINING, StepState.HEALED), Event.YES, StepState.VOTED_YES),
    **_each((StepState.TRAINING, StepState.HEALED, StepState.FAILED), Event.NO, StepState.VOTED_NO),
    # The group's decision. torchft's own manager server never commits a step that a rank voted against
    # (edge.py checks this); the decision of another server is followed, as in upstream.
    **_each(_VOTED, Event.COMMIT, StepState.COMMITTED),
    **_each(_VOTED, Event.LOSE, StepState.LOST),
    # An unanswered vote is repeated. After a decision the group votes on the next step, in the same quorum.
    **_each((StepState.VOTED_YES, *_DECIDED), Event.YES, StepState.VOTED_YES),
    **_each((*_VOTED, *_DECIDED), Event.NO, StepState.VOTED_NO),
    # A second quorum request: an undecided step is dropped.
    **_each((*_RUNNING, *_VOTED), Event.DROP, StepState.DROPPED),
}


def after(state: StepState, event: Event) -> StepState:
    """Returns the state that an event leads to. RuntimeError: the event is not allowed in this state."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise RuntimeError(f"a step that {state.value} cannot {event.value}") from None


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
        state: the initial state.

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
        state: StepState = StepState.ASKED,
        attempted: Optional[Step] = None,
    ) -> None:
        self.request = request
        self.collectives = collectives
        self._copies = copies
        self.kept: Optional[Inputs] = None if attempted is None else attempted.inputs
        self._take(plan)
        self.state = state
        self.began = time.monotonic()
        self.thread = threading.get_ident()
        self.healing = False
        self.sharing = SharedStep() if attempted is None else attempted.sharing
        self.error: Optional[ExceptionWithTraceback] = None
        self._enough = True
        self._lock = threading.Lock()
        # Each is set before the other is read: whichever comes second aborts.
        self._connected = self._aborts = False

    @property
    def outcome(self) -> tuple[int, int, bool, Optional[Exception]]:
        """How it ended: quorum id (-1: none), number of participants, whether committed, its error."""
        quorum_id = -1 if self.plan is None else self.plan.quorum_id
        error = None if self.error is None else self.error.original_exception
        return quorum_id, self.participants, self.committed, error

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

    def _on(self, event: Event) -> None:
        with self._lock:
            self.state = after(self.state, event)

    def follow(self, plan: Plan) -> None:
        """Takes over the plan of its quorum."""
        self._take(plan)
        self.healing = plan.heal
        self._on(Event.BEHIND if plan.heal else Event.QUORUM)

    def _take(self, plan: Optional[Plan]) -> None:
        self.plan = plan
        self.participating_rank = plan.participating_rank if plan is not None else None
        self.participants = plan.participants if plan is not None else 0
        self.peers: Sequence[str] = plan.replica_ids if plan is not None else ()

    def loaded(self) -> None:
        """Records that a peer's state was loaded."""
        self._on(Event.LOADED)

    def joined(self) -> None:
        """Lets this group's gradients count: the state was loaded before the step began."""
        self.healing = False
        self._on(Event.JOINED)

    def failed(self, error: Exception) -> None:
        """Makes this group vote against the step. The first error is kept as the cause."""
        with self._lock:
            if self.error is None:
                self.error = ExceptionWithTraceback(error)
            self.state = after(self.state, Event.ERROR)

    @property
    def known_error(self) -> Optional[ExceptionWithTraceback]:
        """The first error. Tests of other projects set it, and clear it."""
        return self.error

    @known_error.setter
    def known_error(self, error: Optional[ExceptionWithTraceback]) -> None:
        with self._lock:
            self.error = error
            self.collectives.usable = error is None
            if error is not None:
                self.state = after(self.state, Event.ERROR)
            elif self.state is StepState.FAILED:
                self.state = StepState.TRAINING

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
            self._aborts = self.state is StepState.FAILED
        if self._aborts and self._connected:
            self.collectives.abort()

    def vote(self, least: int) -> bool:
        """Returns this rank's vote. An error that comes later does not change it; if the vote is repeated,
        this rank then votes no. `least`: minimum number of participants.
        """
        with self._lock:
            self._enough = self.participants >= least
            yes = self._enough and self.error is None
            self.state = after(self.state, Event.YES if yes else Event.NO)
            return yes

    def decided(self, committed: bool) -> None:
        """Records the decision of the group."""
        self._on(Event.COMMIT if committed else Event.LOSE)

    def dropped(self) -> None:
        """Ends a step on which the group has not decided when the next one begins."""
        self._on(Event.DROP)

    @property
    def undecided(self) -> bool:
        """Whether the step has begun and the group has not decided on it."""
        return self.state in _RUNNING or self.state in _VOTED

    @property
    def committed(self) -> bool:
        """Whether the group has decided to commit it."""
        return self.state is StepState.COMMITTED

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
