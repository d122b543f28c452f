"""The heals of one rank in passing, as source and as target: parts of a state are sent while all groups
train.

This module decides whether a heal can be done in passing. If not, the state is transferred at once, and the
log says why. step_parts.py is the source, joining.py the target. A heal in passing ends as one at once, of
what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Optional

import torch

from torchft._manager.heal.joining import Locate, Target
from torchft._manager.heal.mode import why_at_once
from torchft._manager.heal.step_parts import StepParts
from torchft._manager.heal.together import HealingRanks, Progress
from torchft._manager.heal.tracked import Parameters, Unsupported, addresses
from torchft._manager.settings import HealMode
from torchft.checkpointing.source.offer import with_copies
from torchft.utils import DeviceEvent

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.checks.loader import Data
    from torchft._manager.edge import Transport
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._torchft import MemberFailure


_NO_PARTS = "the source offers no parts of it in this step"


class StillHealing(RuntimeError):
    """The step is not committed because not all of the state of a peer has arrived. It is no failure."""


class Fetch(Enum):
    """The parts of a state that a healing group fetches at once in the present step."""

    NOTHING = "it trains along"
    REST = "the state without the parts that have arrived in passing"
    ALL = "the state"


def why_never(transport: Transport, data: Data) -> Optional[str]:
    """Why groups of this job do not train along while the state of one of them arrives; None: they may."""
    if not transport.gives_parts:
        return "the checkpoint transport gives a state at once only, HTTPTransport gives it in parts as well"
    if data.own_weights:
        return "the groups train on their own between two averages"
    if data.at_end:
        return "this group is at the end of its data, and waits for the groups that heal"
    return None


@dataclass(eq=False)
class InPassing:
    """Heals of one rank, as source and as target.

    Attributes:
        mode: how groups heal; set by :meth:`heal_by`.
        began: when the present heal began, by time.monotonic().
    """

    transport: Transport
    optimizers: Sequence[Optimizer]  # their parameters are healed in parts; more may be added
    locate: Locate
    obstacle: Callable[[], Optional[str]]  # returns why groups cannot train along while they heal
    ranks: HealingRanks
    timeout: float  # seconds without any data after which a request fails
    logger: _ManagerLogger
    min_replica_size: int  # fewest groups that may commit a step

    def __post_init__(self) -> None:
        self.mode = HealMode.AT_ONCE
        self.began = 0.0
        self._known: Optional[Parameters] = None
        self._unsupported: Optional[str] = None  # why these cannot be healed in passing
        self._copied = DeviceEvent(())  # behind the copies of the last state
        # The step whose state this group offers in parts, until it has decided on it, with its parameters.
        self._given: Optional[tuple[Plan, Parameters]] = None
        self._target: Optional[Target] = None
        self._wrote = False  # whether heals that have ended have changed weights since a state was loaded
        self._ends = False  # whether the rest of the state is fetched in the present step
        self._abandoned = False  # until the next heal
        self._closed = False

    # Before a heal

    def heal_by(self, mode: HealMode) -> None:
        """Sets how groups heal, before the first quorum."""
        self.mode = mode
        if self._gives_parts:
            self.transport.prepare_parts(self._names)

    @property
    def _chooses(self) -> bool:
        """Whether a state is transferred at once if that loses less time (mode.py)."""
        return self.mode is HealMode.AUTO

    def _refuses(self) -> Optional[str]:
        return "groups heal at once" if self.mode is HealMode.AT_ONCE else self.obstacle()

    def _parameters(self) -> Parameters:
        """The parameters, described again if they have changed; on the training thread first, in each step.
        Unsupported: they cannot be healed in passing.
        """
        known = self._known
        if known is None or not known.describes(self.optimizers):
            self._known = known = Parameters(self.optimizers)
            try:
                self._unsupported = None
                known.check()
            except Unsupported as e:
                self._unsupported = str(e)
        if self._unsupported is not None:
            raise Unsupported(self._unsupported)
        return known

    def _names(self) -> dict[int, tuple[int, str]]:
        """The names of the storages of the parameters and their optimizer state, by address."""
        try:
            return self._parameters().storages()
        except Unsupported:
            return {}

    @property
    def announces(self) -> str:
        """How this group heals, the same for all of its ranks: "auto" or "in_passing", empty: at once."""
        return self.mode.value if self._refuses() is None else ""

    def why_not(self, groups: Optional[int] = None) -> Optional[str]:
        """Returns why this group heals at once, as far as that is known before a heal; None: it may heal in
        passing. `groups`: number of groups that have the state; None: not known yet.
        """
        reason = self._refuses()
        if reason is not None or not self._chooses:
            return reason
        try:
            nbytes = self._parameters().nbytes
        except Exception as e:
            return str(e)
        return why_at_once(nbytes, groups)

    def prepare(self) -> None:
        """Prepares the optimizers before the first quorum: later, all groups would wait for it."""
        if self.why_not() is not None:
            return
        try:
            self._parameters().prepare()
        except Exception as e:
            self.logger.info(f"the optimizers are not prepared for a heal: {e}")

    def follow(self, plan: Plan) -> None:
        """Takes up a quorum, before the group acts on it: ends the heal if the group is up to date."""
        self._given = None
        if not plan.heal:
            self.stop()
        if self._known is not None and (not plan.heal or plan.max_step == 0):
            self._known.release()

    # The source

    def fixed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fixes a state that a target may request in the middle of the step: what a forward pass may change
        is copied. Called on the training thread.
        """
        if self._refuses() is not None:
            return state
        fixed, devices = with_copies(state, addresses(self.optimizers))
        self._copied = DeviceEvent(device for device in devices if device.type != "cpu")
        return fixed

    def read(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the state that was :meth:`fixed`, behind whose copies later work of this thread runs."""
        state = read()
        self._copied.follow()
        return state

    def offer(self, plan: Plan, whole: Callable[[], None]) -> bool:
        """Offers the state of a step in parts; False if this group offers it only at once. `whole`: offers
        the whole state; called on another thread if a target requests it.
        """
        if not plan.recover_dst or not self._gives_parts or plan.max_step == 0:
            return False
        try:
            if reason := self._refuses():
                raise Unsupported(reason)
            parameters = self._parameters()
            parameters.hyperparameters()  # they are sent with the decision
            self.transport.offer_parts(plan.max_step, StepParts(parameters, whole))
        except Unsupported as e:
            self.refuse(plan, str(e))
            return False
        self._given = plan, parameters
        return True

    def refuse(self, plan: Plan, reason: str) -> None:
        """Tells the targets that this group gives no parts of its state, and will not tell its decision."""
        if self._gives_parts:
            self.transport.refuse_parts(plan.max_step, reason)
            self.transport.note_decision(plan.max_step, plan.quorum_id, None)

    @property
    def _gives_parts(self) -> bool:
        return self.mode is not HealMode.AT_ONCE and self.transport.gives_parts

    def decided(self, committed: bool) -> None:
        """Tells targets, which wait for it, whether the step was committed, and with which hyperparameters.
        Called between the vote and the step of the optimizers; also if the script goes on without a vote.
        """
        given, self._given = self._given, None
        if given is None:
            return
        plan, parameters = given
        try:
            decision = parameters.hyperparameters() if committed else None
        except Unsupported:
            decision = None  # the next step is not offered, with the reason
        self.transport.note_decision(plan.max_step, plan.quorum_id, decision)

    # The target

    def join(self, plan: Plan, may_write: bool) -> Fetch:
        """Begins or continues a heal in passing. `may_write`: whether it may overwrite this group's own
        weights, which are lost if it fails.
        """
        if plan.max_step == 0 or self.mode is HealMode.AT_ONCE:
            return Fetch.ALL
        progress = self.ranks.group_progress(plan.max_step)
        if not self._abandoned:
            reason, chosen = self._why_all(plan, progress, may_write)
            if reason is not None:
                self._abandon(reason, plan.max_step, chosen)
        if self._abandoned or self._target is None:  # a shutdown on another thread clears it
            self._report(plan.max_step, Progress.WHOLE)
            return Fetch.ALL
        self._ends = self._target.heal.ends
        return Fetch.REST if self._ends else Fetch.NOTHING

    def _why_all(self, plan: Plan, progress: Progress, may_write: bool) -> tuple[Optional[str], bool]:
        """Takes a quorum over. Returns why the whole state is fetched, if it is, and whether that is a choice
        instead of a failure.
        """
        if progress is Progress.WHOLE:
            # That rank says why, and warns if it did not choose it.
            return "another rank of this group needs the whole state", True
        if plan.participating_rank is not None:
            # with a synchronous quorum, in which not all groups heal in passing
            counted = "the other groups count on the gradients of this one in this step"
            return self.why_not() or counted, self._chooses
        if plan.participants < self.min_replica_size:
            return "without this group too few take part, so that no step would be committed", self._chooses
        target = self._target
        if target is None:
            if reason := self.why_not(plan.num_up_to_date):
                return reason, self._chooses
            if not plan.gives_parts:
                return _NO_PARTS, self._chooses
            if not may_write:
                alone = "one group alone has it: if that failed, this group would go on with its own weights"
                return alone, self._chooses
            try:
                parameters = self._parameters()
                parameters.check()  # again: they may have moved since they were described
            except Unsupported as e:
                return str(e), self._chooses
            self.began = time.monotonic()
            self._target = target = Target(parameters, self.transport, self.locate, self.timeout, self.logger)
            if self._closed:
                self.stop()
        target.quorum(plan, together=progress is Progress.READY)
        if target.heal.abandoned is not None or target.heal.ends:
            return target.heal.abandoned, False
        if not plan.gives_parts:
            return _NO_PARTS, self._chooses
        return target.why_at_once() if self._chooses else None, True

    def has(self, number: int, key: str) -> torch.UntypedStorage:
        """Memory of a parameter, or of its optimizer state, that has arrived in passing, or KeyError."""
        target = self._target
        if target is None:
            raise KeyError("the heal in passing has ended")
        return target.parameters.storage(number, key)

    @property
    def joining(self) -> bool:
        """Whether a heal in passing is in progress, so that this group trains along."""
        return self._target is not None and not self._ends

    @property
    def wrote(self) -> bool:
        """Whether heals in passing have changed weights since a state was loaded."""
        target = self._target
        return self._wrote or (target is not None and target.wrote)

    def advance(self, reduced: bool, optimizer: Optional[Optimizer] = None) -> None:
        """Ends a step of a group that trains along, on the training thread, before it votes; see
        :meth:`Target.advance`.
        """
        self._end_step(lambda target: target.advance(reduced, optimizer))

    def steps_too(self, optimizer: Optimizer) -> None:
        """Ends a step for another optimizer, which shares the vote."""
        self._end_step(lambda target: target.steps_too(optimizer))

    def _end_step(self, end: Callable[[Target], None]) -> None:
        target = self._target
        if target is None:  # a shutdown on another thread
            return
        try:
            end(target)
        except Exception as e:
            target.abandon(str(e) if isinstance(e, Unsupported) else repr(e))
        assert target.heal.step is not None
        if target.heal.abandoned is not None:
            self._abandon(target.heal.abandoned, target.heal.step)
        elif target.heal.complete:
            self._report(target.heal.step, Progress.READY)

    def _report(self, step: int, progress: Progress) -> None:
        try:
            self.ranks.report(step, progress)
        except Exception as e:
            self.logger.warn(f"the other ranks of the group do not know how far the heal of this one is: {e}")

    def _abandon(self, reason: str, step: int, chosen: bool = False) -> None:
        self.stop()
        self._abandoned = True
        self._report(step, Progress.WHOLE)
        log = self.logger.info if chosen else self.logger.warn
        log(f"the state is transferred at once, and the other groups wait for it: {reason}")

    def failed(self, plan: Plan, error: Exception) -> None:
        """Gives up a heal in passing, because the rest of its state did not arrive."""
        if self._target is not None:
            self._abandon(str(error), plan.max_step)

    def reduces(self) -> None:
        """Ends the time in which requests follow each other: the training thread reduces a tensor."""
        target = self._target
        if target is not None:
            target.reduces()

    def peer_failed(self, failure: MemberFailure) -> None:
        """Ends the waits for a source that is reported to have failed; on any thread."""
        target = self._target
        if target is not None:
            target.peer_failed(failure)

    def how_far(self) -> str:
        """The progress of the heal, as text for logs and errors."""
        target = self._target
        return target.how_far() if target is not None else "the state of a peer is transferred at once"

    def healed(self) -> None:
        """Forgets an earlier heal, once a state was loaded: the next one may be in passing."""
        self._abandoned = self._wrote = False
        target = self._target
        if target is not None:
            target.wrote = False

    def stop(self) -> None:
        """Ends the heal in passing, and its request thread."""
        target = self._target
        if target is not None:
            target.stop()
            self._wrote = self._wrote or target.wrote
            self._target = None

    def close(self) -> None:
        """Ends the heals for good, on any thread: another one may begin one now."""
        self._closed = True  # before the look at the target; :meth:`join` sets that first, then looks at this
        self.stop()
