"""The target's part of a heal in passing: trains along while the state of a peer arrives.

rules.py decides what to request and how to use the answers. tracked.py changes the tensors. The checkpoint
transport transfers the parts.

The *request thread* sends one request at a time, puts the parts that arrive in place, and compares digests.
Before its vote the training thread asks the source whether it has committed the step. If so, it applies the
gradient while the other groups step their optimizers. If the source does not answer, the gradient is kept
until the next quorum, which shows whether the step was committed, and applied by the thread that follows that
quorum. A forward or backward pass may run at the same time as both: its results are not used during a heal.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Optional

import torch

from torchft._manager.heal.mode import Measured
from torchft._manager.heal.pace import Pace
from torchft._manager.heal.rules import NOTHING, Ask, Heal, Outcome
from torchft._manager.heal.tracked import Parameters, Unsupported
from torchft._manager.settings import HealMode
from torchft.checkpointing.client.request import Abandon, Busy, RequestRefused
from torchft.checkpointing.client.retry import Attempts
from torchft.checkpointing.codec.requests import StatePart
from torchft.checkpointing.transport import CheckpointError
from torchft.utils import DeviceThread, weakly

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.edge import Transport
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan

# The most seconds that a vote waits for the part in progress.
_PART_SEC = 0.01
# The most seconds that a step of the target waits for the first answer of the step, which has the
# hyperparameters. The source cannot vote before this group reduces, so that it can answer.
_FIRST_SEC = 2.0
# A request fails after this many seconds without any data, so that the next one may go to another source.
_SILENT_SEC = 10.0
# The most seconds that a target waits for the source's decision: both vote at the same time.
_DECISION = timedelta(seconds=1)

# Refusals for which the next request may succeed. Any other source has no parts; one of upstream answers 500.
_OF_THIS_STEP = HTTPStatus.BAD_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE

Locate = Callable[[str], str]


class Target:
    """One heal of this rank.

    Args:
        parameters: what arrives in parts.
        transport: receives them.
        locate: given the address of a group's manager server, returns where the same rank of that group
            offers its state.
        timeout: seconds without any data after which a request fails.

    Attributes:
        wrote: whether the heal has changed weights.
        pace: the pauses between requests.
    """

    wrote = False

    def __init__(
        self,
        parameters: Parameters,
        transport: Transport,
        locate: Locate,
        timeout: float,
        logger: _ManagerLogger,
    ) -> None:
        self.parameters = parameters
        self._transport = transport
        self._locate = weakly(locate)  # else the request thread would keep the Manager alive
        self._timeout = timeout
        self._logger = logger
        self.pace = Pace()
        self.heal = Heal(parameters.total)
        self._layout = parameters.layout()
        self._cond = threading.Condition()  # guards all below
        self._plan: Optional[Plan] = None
        self._open = False  # whether requests may begin: from the quorum of a step to its vote
        self._takes = False  # whether parts may be put in place
        self._asked = NOTHING
        self._request: Optional[Abandon] = None  # of the request in progress, that for _asked
        self._decision: Optional[Abandon] = None  # of the training thread
        self._attempts = Attempts()
        self._first_until = 0.0  # the end of all waits for the first answer of this step, by time.monotonic()
        self._again_at = 0.0  # the end of a pause after a failed request, by time.monotonic()
        self._gave_up = False  # on this source, in this step
        self._silent = ""  # an assigned source that did not report whether it committed
        self._located: dict[str, str] = {}  # where sources offer their state
        self._hyperparameters: dict[int, Any] = {}  # of the source, by step
        self._kept: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}  # gradients kept before, whose memory is used again
        self._voted = False  # whether this group has voted since the latest quorum
        self._keeps = self._committed = False  # whether that vote's gradients are kept, or applied
        # Whether _kept was applied since the last vote, while the training loop may change it.
        self._early = False
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._measured = Measured(parameters.rest_nbytes())
        self._over = False
        self._thread = DeviceThread(target=self._run, name="torchft_heal_along")

    def quorum(self, plan: Plan, together: bool) -> None:
        """Takes over a quorum in which this group heals (:meth:`Heal.quorum`) with the kept gradient."""
        with self._cond:
            before, self._plan = self._plan, plan
            if self._request is not None:
                self._request.because(CheckpointError("a new quorum is known"))
            now = time.monotonic()
            self.pace.quorum(now)
            self._attempts, self._again_at, self._gave_up = Attempts(), 0.0, False
            self._first_until = now + _FIRST_SEC
            outcome = self.heal.quorum(plan.max_step, plan.quorum_id, plan.committed_quorum_id, now, together)
            if outcome is Outcome.MISSED:
                self._logger.warn(
                    f"step {plan.max_step - 1} was committed without this group: its heal starts over"
                )
            if outcome is Outcome.APPLY:
                with self.parameters.side_stream.running():
                    self._apply_kept(plan.max_step - 1)
            self._hyperparameters.pop(plan.max_step, None)  # of an earlier attempt at this step
            self._open, self._takes, self._voted = True, True, False
            if before is None:
                self._logger.info(
                    f"training along from step {plan.max_step} on while the state arrives in parts"
                )
                self._thread.start()
            self._cond.notify_all()

    def _apply_kept(self, step: int) -> None:
        if step not in self._hyperparameters:
            self.heal.miss()
            return
        self._step(self._kept, step)
        self._early = self._unchanged()

    def _unchanged(self) -> bool:
        """Starts over if the kept gradients were changed in place, by a training loop that does not drop
        them. Checked once more before the vote, since PyTorch increments a tensor's version at the end of a
        change.
        """
        if self.parameters.unchanged(self._kept):
            return True
        self._logger.info(
            "the training loop changes gradients in place: they are copied, and the heal starts over"
        )
        self.heal.miss()
        return False

    def why_at_once(self) -> Optional[str]:
        """Why this heal should end after a quorum, and the whole state be transferred at once; None: it
        should not, or that is not known.
        """
        with self._cond:
            assert self._plan is not None
            total, groups = self.parameters.total, self._plan.num_up_to_date
            limit = math.inf if self._plan.awaits_heals else self._timeout
            settled, overlap = self.pace.share.settled, self.pace.overlap if self._plan.in_background else 0.0
            figures = self._measured.quorum(time.monotonic(), total, overlap, groups, limit, settled)
        if figures is None or figures.mode is HealMode.IN_PASSING:
            return None
        return (
            f"that loses {figures.lost_at_once:.1f} s of all groups together, and the rest in parts would "
            f"lose {figures.lost_in_passing:.1f} s"
        )

    def peer_failed(self, quorum_id: int, replica_id: str) -> None:
        """A group of a quorum has failed. If it is the source, nothing waits until another one is named."""
        with self._cond:
            plan = self._plan
            if plan is None or plan.source is None or self._over:
                return
            if (plan.quorum_id, plan.source.replica_id) == (quorum_id, replica_id):
                self._gave_up = True
                self._abort("the source has failed")

    def how_far(self) -> str:
        """The progress of the heal, as text for logs and errors."""
        return f"{self.heal.here} of {self.heal.total} elements of the state are here"

    def abandon(self, reason: str) -> None:
        with self._cond:
            self.heal.abandon(reason)

    def stop(self) -> None:
        """Tells the request thread to end; no further answer is put in place."""
        with self._cond:
            self._over, self._open, self._takes = True, False, False
            self._abort("the heal in passing has ended")

    def _abort(self, reason: str) -> None:
        """Aborts the requests in progress."""
        for request in (self._request, self._decision):
            if request is not None:
                request.because(CheckpointError(reason))
        self._cond.notify_all()

    # The training thread

    def reduces(self) -> None:
        """Ends the time in which requests follow each other, and waits for the first answer of the step."""
        with self._cond:
            self.pace.reduces(time.monotonic())
            self._await_first()

    def _await_first(self) -> None:
        step, left = self.heal.step, self._first_until - time.monotonic()
        self._cond.wait_for(lambda: step in self._hyperparameters or not self._asks(), max(0.0, left))

    def advance(self, reduced: bool, optimizer: Optional[Optimizer] = None) -> None:
        """Ends a step before the vote: applies or keeps the gradient.

        Args:
            reduced: whether all of the step's reductions have succeeded.
            optimizer: the one that steps if the step is committed; None: not known.

        Raises:
            Unsupported: it is not known which of several optimizers step.
        """
        if self._several and (optimizer is None or self._voted):
            raise Unsupported(
                "of several optimizers, a vote was not the step of one, or was the second in a step"
            )
        with self._marked():
            heal = self.heal
            self._await_first()
            self._open = False
            self._cond.wait_for(lambda: self._request is None or self._gave_up, _PART_SEC)
            if self._request is not None:
                if not self._asked.empty:
                    heal.late()
                self._request.because(CheckpointError("the step has ended"))
            self._takes = False
            if self._early:
                self._unchanged()
            self._early, self._voted = False, True
            self._keeps = reduced and heal.abandoned is None and heal.step in self._hyperparameters
            if self._keeps:
                heal.keep()
        self._committed = self._keeps and self._source_committed()
        with self._marked():
            if self._committed:
                heal.committed()
            if self._keeps:
                self._kept, self._copies = {}, self.parameters.copies(self._kept)
            self._use_gradients(optimizer)

    def steps_too(self, optimizer: Optimizer) -> None:
        """Ends a step for another optimizer, which shares the vote: applies or keeps its gradients."""
        with self._marked():
            self._use_gradients(optimizer)

    @property
    def _several(self) -> bool:
        return len(self.parameters.given) > 1

    def _use_gradients(self, optimizer: Optional[Optimizer]) -> None:
        numbers = self.parameters.begun(self.heal.here)
        if self._several:
            numbers &= self.parameters.numbers(optimizer)
        if self._committed:
            assert self.heal.step is not None
            self._step(self.parameters.present_gradients(numbers), self.heal.step)
        elif self._keeps:
            self._kept.update(self.parameters.gradients(numbers, self._copies))

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Takes the lock, and orders device work of other threads behind that of the training thread."""
        with self._cond:
            try:
                yield
            finally:
                self.parameters.side_stream.mark()

    def _step(self, gradients: dict[int, torch.Tensor], step: int) -> None:
        self.wrote = True
        self.parameters.step(self.parameters.begun(self.heal.here), gradients, self._hyperparameters[step])

    def _source_committed(self) -> bool:
        """Whether the source reports that it has committed the current step."""
        with self._cond:
            assert self._plan is not None
            plan, source = self._plan, _source(self._plan)
            if source == self._silent or self._gave_up or source not in self._located:
                return False  # a source that has failed does not answer
            metadata, self._decision = self._located[source], Abandon()
        try:
            decided = self._transport.recv_decision(
                metadata=metadata,
                step=plan.max_step,
                quorum_id=plan.quorum_id,
                timeout=_DECISION,
                abandon=self._decision,
            )
            return decided is True
        except Exception as e:
            self._logger.info(f"gradients are applied a step later: {source} did not say how it decided: {e}")
            self._silent = source
            return False
        finally:
            self._decision = None

    # The request thread

    def _asks(self) -> bool:
        """Whether there are requests in this step."""
        return self._open and self.heal.abandoned is None and not self.heal.ends and not self._gave_up

    def _run(self) -> None:
        while (found := self._next()) is not None:
            ask, plan, request = found
            began = time.monotonic()
            try:
                self._receive(ask, plan, request)
            except Exception as e:
                with self._cond:
                    self._failed(plan, e)
            with self._cond:
                self._request = None
                if not ask.empty:
                    self.pace.spent(began, time.monotonic())
                self._cond.notify_all()

    def _next(self) -> Optional[tuple[Ask, Plan, Abandon]]:
        """Waits for the next request; None: the heal in passing has ended."""
        with self._cond:
            while not self._over:
                pause: Optional[float] = None
                if self._asks():
                    now, first = time.monotonic(), self.heal.step not in self._hyperparameters
                    ask, pause = self.heal.next(), max(self.pace.pause(now), self._again_at - now)
                    if first and now >= self._again_at:
                        # All groups may wait for the first answer in a step. It does not wait for the end of
                        # a pause, but then it has no part.
                        ask, pause = ask if pause <= 0 else NOTHING, 0.0
                    if pause <= 0 and (first or not ask.empty):
                        assert self._plan is not None
                        self._asked, self._request = ask, Abandon()
                        return ask, self._plan, self._request
                    pause = None if ask.empty else pause
                self._cond.wait(pause)
            return None

    def _receive(self, ask: Ask, plan: Plan, request: Abandon) -> None:
        began, source = time.monotonic(), _source(plan)
        if source not in self._located:
            locate = self._locate()
            if locate is None:
                raise CheckpointError("the Manager of this heal no longer exists")
            self._located = {source: locate(source)}
        part = self._transport.recv_part(
            metadata=self._located[source],
            step=plan.max_step,
            key=ask.key,
            timeout=timedelta(seconds=min(self._timeout, _SILENT_SEC)),
            memory=partial(self._begin, ask, plan),
            abandon=request,
        )
        with self._cond:
            request.check("a part of the state")
            if self._plan is plan and self._takes and not ask.empty:
                self._take(ask, part, time.monotonic() - began)

    def _begin(self, ask: Ask, plan: Plan, value: Any, nbytes: int) -> torch.Tensor:
        """Takes up the description of a part that begins to arrive. Returns the memory for it."""
        if value["layout"] != self._layout:
            raise Unsupported("parameters or optimizers differ from the source's")
        self.parameters.sizes(ask.begin, ask.end, value["states"], nbytes)  # before there is memory for it
        with self._cond:
            if self._plan is plan:
                self._attempts = Attempts()
                known, step = self._hyperparameters, plan.max_step
                self._hyperparameters = {one: of for one, of in known.items() if one == step - 1}
                self._hyperparameters[step] = value["hyperparameters"]
                self._cond.notify_all()
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer[:nbytes]

    def _take(self, ask: Ask, part: StatePart, seconds: float) -> None:
        """Puts a part of the current step in place, and compares a digest."""
        heal, parameters = self.heal, self.parameters
        with parameters.side_stream.running():
            parameters.check_groups()
            if ask.same_to > ask.same_from:
                heal.compared(ask, parameters.digest(ask.same_from, ask.same_to) == part.value["digest"])
                return
            self.wrote = True
            parameters.write(ask.begin, ask.end, part.value["states"], part.memory)
        self._measured.part(part.memory.numel(), ask.end - ask.begin, seconds)
        heal.arrived(ask, self.pace.of_step(seconds))

    def _failed(self, plan: Plan, error: Exception) -> None:
        if self._plan is not plan or not self._open:
            return
        if isinstance(error, Unsupported):
            self.heal.abandon(str(error))
        elif isinstance(error, RequestRefused) and error.status not in _OF_THIS_STEP:
            self.heal.abandon(f"the source: {error}")
        else:
            self._logger.info(f"a request for a part of the state failed: {error}")
            retry_after = error.retry_after if isinstance(error, Busy) else None
            pause = self._attempts.failed(False, self._timeout, retry_after)
            self._gave_up, self._again_at = pause is None, time.monotonic() + (pause or 0.0)


def _source(plan: Plan) -> str:
    """The address of the assigned source."""
    assert plan.source is not None
    return plan.source.manager_address
