"""The heals of one rank in passing, as source and as target: parts of a state are sent while all groups
train.

This module decides whether a heal can be done in passing. If not, the state is transferred at once, and the
log says why. part_server.py is the source, joining.py the target. A heal in passing ends as one at once, of
what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import torch

from torchft._manager.heal.joining import Locate, Target
from torchft._manager.heal.mode import why_at_once
from torchft._manager.heal.part_server import PartServer, StepParts
from torchft._manager.heal.together import HealingRanks, Progress
from torchft._manager.heal.tracked import Parameters, Unsupported
from torchft._manager.settings import HealMode
from torchft.checkpointing.source.offer import with_copies
from torchft.utils import DeviceEvent

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.checks.layout import Layout
    from torchft._manager.checks.loader import Data
    from torchft._manager.edge import Transport
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan


_NO_PARTS = "the source offers no parts of it in this step"


class StillHealing(RuntimeError):
    """The step is not committed because not all of the state of a peer has arrived. It is no failure."""


class Fetch(Enum):
    """The parts of a state that a healing group fetches at once in the present step."""

    NOTHING = "it trains along"
    REST = "the state without the parts that have arrived in passing"
    ALL = "the state"


class Obstacles:
    """The reasons why groups of this job do not train along while the state of one of them arrives."""

    def __init__(self, transport: Transport, layout: Layout, data: Data) -> None:
        self._transport = transport
        self._layout = layout
        self._data = data

    def first(self) -> Optional[str]:
        """Describes one of them; None: there is none."""
        if not self._transport.gives_parts:
            return (
                "the checkpoint transport gives a state at once only, HTTPTransport gives it in parts as well"
            )
        if self._layout.lines is not None and not self._data.adds_gradients:
            return "the groups train on their own between two averages"
        if self._data.at_end:
            return "this group is at the end of its data, and waits for the groups that heal"
        return None

    def to_snapshots(self) -> Optional[str]:
        """Describes why a copy of this group's state is not one of the job; None: it is."""
        if self._data.averages_weights or (self._layout.lines is not None and not self._data.adds_gradients):
            return "with LocalSGD and DiLoCo each group has weights of its own between two averages"
        return None


class InPassing:
    """Heals of one rank, as source and as target.

    Args:
        transport: the transport, which gives and receives parts.
        optimizers: their parameters, with optimizer state, are healed in parts. More may be added to this
            sequence.
        locate: given the address of a group's manager server, returns where the same rank of that group
            offers its state.
        refuses: returns why a group cannot train along while it heals; None if it can.
        ranks: the ranks of this group, which all end a heal in the same step.
        timeout: seconds without any data after which a request fails.
        chooses: whether a state is transferred at once if that loses less time (mode.py).
        min_replica_size: fewest groups that may commit a step.

    Attributes:
        began: when the present heal began, by time.monotonic().
        wrote: whether heals that have ended, or the present one until its last vote, have changed weights
            since a state was loaded.
    """

    began = 0.0
    wrote = False

    def __init__(
        self,
        transport: Transport,
        optimizers: Sequence[Optimizer],
        locate: Locate,
        refuses: Callable[[], Optional[str]],
        ranks: HealingRanks,
        timeout: float,
        logger: _ManagerLogger,
        chooses: bool = False,
        min_replica_size: int = 1,
    ) -> None:
        self._transport = transport
        self._chooses = chooses
        self._min_replica_size = min_replica_size
        self._optimizers = optimizers
        self._refuses = refuses
        self._ranks = ranks
        self._logger = logger
        self._make_target = partial(
            Target, transport=transport, locate=locate, timeout=timeout, logger=logger
        )
        self._part_server = PartServer(optimizers)
        self._known: Optional[list[Optimizer]] = None  # those of the next two
        self._unsupported: Optional[str] = None
        self._nbytes = 0
        self._prepared: Optional[Parameters] = None
        self._target: Optional[Target] = None
        self._copied = DeviceEvent(())  # behind the copies of the last state
        self._ends = False  # whether the rest of the state is fetched in the present step
        self._abandoned = False  # until the next heal
        self._gives = False  # whether this group offers the state of the present step in parts
        if transport.gives_parts:
            transport.prepare_parts(self._part_server.names)

    @property
    def announces(self) -> str:
        """How this group heals, the same for all of its ranks: "auto" or "in_passing", empty: at once."""
        if self._refuses() is not None:
            return ""
        return (HealMode.AUTO if self._chooses else HealMode.IN_PASSING).value

    def why_not(self, groups: Optional[int] = None) -> Optional[str]:
        """Returns why this group heals at once, as far as that is known before a heal; None: it may heal in
        passing. Called on the training thread first, in each step. `groups`: number of groups that have the
        state; None: not known yet.
        """
        reason = self._refuses()
        if reason is not None or not self._chooses:
            return reason
        if self._known is None or self._known != list(self._optimizers):
            self._known = list(self._optimizers)
            try:
                parameters = Parameters(self._known)
                parameters.check()
                self._unsupported, self._nbytes = None, parameters.nbytes()
            except Exception as e:
                self._unsupported = str(e)
        return self._unsupported or why_at_once(self._nbytes, groups)

    def prepare(self) -> None:
        """Prepares the optimizers before the first quorum: later, all groups would wait for it."""
        self._prepared = None
        if self.why_not() is not None:
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
        """Returns the parameters of the last :meth:`prepare`: at the first call only, and unless the
        optimizers have changed since. Otherwise None.
        """
        parameters, self._prepared = self._prepared, None
        try:
            if parameters is not None:
                parameters.check()
                parameters.check_groups()
                parameters.side_stream.mark()
        except Unsupported:
            return None
        return parameters

    def follow(self, plan: Plan) -> None:
        """Takes up a quorum, before the group acts on it: ends the heal if the group is up to date."""
        self._gives = False
        if not plan.heal:
            self.stop()
            self._prepared = None

    def decided(self, plan: Plan, committed: bool) -> None:
        """Publishes the decision of this group on a step, which targets can request."""
        if self._gives:
            self._transport.note_decision(plan.max_step, plan.quorum_id, committed)

    def fixed(self, state: dict[str, Any]) -> dict[str, Any]:
        """Fixes a state that a target may request in the middle of the step: what a forward pass may change
        is copied. Called on the training thread.
        """
        if not self._transport.gives_parts or self._refuses() is not None:
            return state
        fixed, devices = with_copies(state, self._part_server.addresses())
        self._copied = DeviceEvent(device for device in devices if device.type != "cpu")
        return fixed

    def read(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the state that was :meth:`fixed`, behind whose copies later work of this thread runs."""
        state = read()
        self._copied.follow()
        return state

    def offer(self, plan: Plan, whole: Callable[[], None]) -> bool:
        """Offers the state of a step in parts.

        Args:
            whole: offers the whole state, on another thread; called if a target requests it.

        Returns:
            False if this group offers its state only at once.
        """
        if not plan.recover_dst or not self._transport.gives_parts or plan.max_step == 0:
            return False
        reason = self._refuses()
        try:
            if reason is not None:
                raise Unsupported(reason)
            self._transport.offer_parts(plan.max_step, StepParts(*self._part_server.parameters(), whole))
        except Unsupported as e:
            self._transport.refuse_parts(plan.max_step, str(e))
            return False
        self._gives = True
        return True

    def refuse(self, plan: Plan, reason: str) -> None:
        """Tells the targets that this group gives no parts of its state."""
        if self._transport.gives_parts:
            self._transport.refuse_parts(plan.max_step, reason)

    def join(self, plan: Plan, may_write: bool) -> Fetch:
        """Begins or continues a heal in passing.

        Args:
            plan: the plan of a quorum in which this group heals.
            may_write: whether the heal may overwrite this group's own weights, which are lost if it fails.
        """
        prepared = self._take_prepared()
        if plan.max_step == 0:
            return Fetch.ALL
        progress = self._ranks.group_progress(plan.max_step)
        if progress is Progress.WHOLE and not self._abandoned:
            # That rank says why, and warns if it did not choose it.
            reason = "another rank of this group needs the whole state"
            self._abandon(reason, plan.max_step, chosen=True)
        elif plan.participating_rank is not None and not self._abandoned:
            # with a synchronous quorum, in which not all groups heal in passing
            counted = "the other groups count on the gradients of this one in this step"
            self._abandon(self.why_not() or counted, plan.max_step, chosen=self._chooses)
        elif plan.participants < self._min_replica_size and not self._abandoned:
            needed = "without this group too few take part, so that no step would be committed"
            self._abandon(needed, plan.max_step, chosen=self._chooses)
        if self._abandoned:
            self._report(plan.max_step, Progress.WHOLE)
            return Fetch.ALL
        target = self._target  # read once: a shutdown on another thread clears it
        if target is None:
            parameters = prepared or Parameters(self._optimizers)
            try:
                if reason := self.why_not(plan.num_up_to_date):
                    raise Unsupported(reason)
                if not plan.gives_parts:
                    raise Unsupported(_NO_PARTS)
                if not may_write:
                    raise Unsupported(
                        "one group alone has it: if that failed, this group would go on with its own weights"
                    )
                parameters.check()
            except Unsupported as e:
                self._abandon(str(e), plan.max_step, chosen=self._chooses)
                return Fetch.ALL
            self.began = time.monotonic()
            self._target = target = self._make_target(parameters)
        try:
            target.quorum(plan, together=progress is Progress.READY)
        except Exception as e:
            target.abandon(str(e) if isinstance(e, Unsupported) else repr(e))
        reason, chosen = target.heal.abandoned, False
        if reason is None and not target.heal.ends and not plan.gives_parts:
            reason, chosen = _NO_PARTS, self._chooses
        if self._chooses and reason is None and not target.heal.ends:
            reason, chosen = target.why_at_once(), True
        if reason is not None:
            self._abandon(reason, plan.max_step, chosen)
            return Fetch.ALL
        self._ends = target.heal.ends
        return Fetch.REST if self._ends else Fetch.NOTHING

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

    def advance(self, reduced: bool, optimizer: Optional[Optimizer] = None) -> None:
        """Ends a step of a group that trains along, on the training thread, before it votes.

        Args:
            reduced: whether all of the step's reductions have succeeded.
            optimizer: the one that steps if the step is committed; None: not known.
        """
        self._end_step(lambda target: target.advance(reduced, optimizer))

    def steps_too(self, optimizer: Optimizer) -> None:
        """Ends a step for another optimizer, which shares the vote."""
        if self.joining:
            self._end_step(lambda target: target.steps_too(optimizer))

    def _end_step(self, end: Callable[[Target], None]) -> None:
        target = self._target
        if target is None:  # a shutdown on another thread
            return
        try:
            end(target)
        except Exception as e:
            target.abandon(str(e) if isinstance(e, Unsupported) else repr(e))
        self.wrote = self.wrote or target.wrote
        assert target.heal.step is not None
        if target.heal.abandoned is not None:
            self._abandon(target.heal.abandoned, target.heal.step)
        elif target.heal.complete:
            self._report(target.heal.step, Progress.READY)

    def _report(self, step: int, progress: Progress) -> None:
        try:
            self._ranks.report(step, progress)
        except Exception as e:
            self._logger.warn(
                f"the other ranks of the group do not know how far the heal of this one is: {e}"
            )

    def _abandon(self, reason: str, step: int, chosen: bool = False) -> None:
        self.stop()
        self._abandoned = True
        self._report(step, Progress.WHOLE)
        log = self._logger.info if chosen else self._logger.warn
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

    def peer_failed(self, quorum_id: int, replica_id: str) -> None:
        """Ends the waits for a source that is reported to have failed; on any thread."""
        target = self._target
        if target is not None:
            target.peer_failed(quorum_id, replica_id)

    def how_far(self) -> str:
        """The progress of the heal, as text for logs and errors."""
        target = self._target
        return target.how_far() if target is not None else "the state of a peer is transferred at once"

    def healed(self) -> None:
        """Forgets an earlier heal, once a state was loaded: the next one may be in passing."""
        self._abandoned = self.wrote = False
        target = self._target
        if target is not None:
            target.wrote = False

    def stop(self) -> None:
        """Ends the heal in passing, and its request thread."""
        target, self._target = self._target, None
        if target is not None:
            target.stop()
            self.wrote = self.wrote or target.wrote  # also what the request thread wrote after the last vote
