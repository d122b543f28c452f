"""The target's part of a heal in passing: trains along while the state of a peer arrives.

in_passing_rules.py decides what to request and how to use the answers. tracked.py changes the tensors. The
checkpoint transport transfers the parts.

The *request thread* sends one request at a time, puts the parts that arrive in place, and compares digests.
Before its vote the training thread asks the source whether it has committed the step, and with which
hyperparameters. If so, it applies the gradient while the other groups step their optimizers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Optional

import torch

from torchft._manager.heal.in_passing_rules import Ask, Heal
from torchft._manager.heal.mode import Measured
from torchft._manager.heal.pace import Pace
from torchft._manager.heal.tracked import Json, Parameters, Unsupported
from torchft._manager.settings import HealMode
from torchft.checkpointing.client.request import Abandon, Busy, RequestRefused
from torchft.checkpointing.codec.requests import StatePart
from torchft.checkpointing.transport import CheckpointError
from torchft.utils import DeviceThread, weakly

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.edge import Transport
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._torchft import MemberFailure

# A request fails after this many seconds without any data, so that the next one may go to another source. So
# does that for a decision: a source may have begun another step without a vote.
_SILENT_SEC = 10.0
# The seconds between a request that has failed and the next one.
_RETRY_SEC = 0.2

# Refusals for which the next request may succeed. Any other source has no parts; one of upstream answers 500.
_OF_THIS_STEP = HTTPStatus.BAD_REQUEST, HTTPStatus.SERVICE_UNAVAILABLE

# Given the address of a group's manager server, returns where the same rank of that group offers its state.
Locate = Callable[[str], str]


@dataclass(eq=False)
class Target:
    """One heal of this rank.

    Attributes:
        wrote: whether the heal has changed weights.
        pace: the pauses between requests.
    """

    parameters: Parameters  # what arrives in parts
    transport: Transport
    locate: InitVar[Locate]
    timeout: float  # seconds without any data after which a request fails
    logger: _ManagerLogger

    def __post_init__(self, locate: Locate) -> None:
        self._locate = weakly(locate)  # else the request thread would keep the Manager alive
        self.wrote = False
        self.pace = Pace()
        self.heal = Heal(self.parameters.total)
        self.parameters.side_stream.mark()
        self._cond = threading.Condition()  # guards all below
        self._plan: Optional[Plan] = None
        self._open = False  # whether requests may begin: from the quorum of a step to its vote
        self._takes = False  # whether parts may be put in place
        self._request: Optional[Abandon] = None  # of the request in progress
        self._decision: Optional[Abandon] = None  # of the training thread
        self._again_at = 0.0  # the end of a pause after a failed request, by time.monotonic()
        self._failed = False  # whether the source is reported to have failed
        self._located = "", ""  # a source, and where it offers its state
        # The source's, in the step that it has committed and this group votes on; None: it is not known.
        self._hyperparameters: Optional[Json] = None
        self._voted = False  # whether this group has voted since the latest quorum
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._measured = Measured(self.parameters.total, self.parameters.rest_nbytes())
        self._over = False
        self._thread = DeviceThread(target=self._run, name="torchft_heal_along")

    def quorum(self, plan: Plan, together: bool) -> None:
        """Takes over a quorum in which this group heals, see :meth:`Heal.quorum`."""
        with self._cond:
            before, self._plan = self._plan, plan
            if self._request is not None:
                self._request.because(CheckpointError("a new quorum is known"))
            now = time.monotonic()
            self.pace.quorum(now)
            self._again_at, self._failed = 0.0, False
            if not self.heal.quorum(plan.max_step, plan.quorum_id, plan.committed_quorum_id, now, together):
                self.logger.warn(
                    f"step {plan.max_step - 1} was committed without this group: its heal starts over"
                )
            self._open, self._takes, self._voted = True, True, False
            if before is None:
                self.logger.info(
                    f"training along from step {plan.max_step} on while the state arrives in parts"
                )
                self._thread.start()
            self._cond.notify_all()

    def why_at_once(self) -> Optional[str]:
        """Why this heal should end after a quorum, and the whole state be transferred at once; None: it
        should not, or that is not known.
        """
        with self._cond:
            assert self._plan is not None
            groups = self._plan.num_up_to_date
            limit = math.inf if self._plan.awaits_heals else self.timeout
            settled, overlap = self.pace.share.settled, self.pace.overlap if self._plan.in_background else 0.0
            figures = self._measured.quorum(time.monotonic(), overlap, groups, limit, settled)
        if figures is None or figures.mode is HealMode.IN_PASSING:
            return None
        return (
            f"that loses {figures.lost_at_once:.1f} s of all groups together, and the rest in parts would "
            f"lose {figures.lost_in_passing:.1f} s"
        )

    def peer_failed(self, failure: MemberFailure) -> None:
        """If it is the source that has failed, nothing waits until another one is named."""
        with self._cond:
            plan = self._plan
            if plan is None or plan.source is None or self._over:
                return
            if (plan.quorum_id, plan.source.replica_id) == (failure.quorum_id, failure.replica_id):
                self._failed = True
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
        """Ends the time in which requests follow each other."""
        with self._cond:
            self.pace.reduces(time.monotonic())

    def advance(self, reduced: bool, optimizer: Optional[Optimizer] = None) -> None:
        """Ends a step before the vote: applies its gradient if the source has committed it.

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
        with self._cond:
            self._open = False
            self._cond.wait_for(lambda: self._request is None or self._failed, self.heal.patience)
            if self._request is not None:
                self.heal.late()
                self._request.because(CheckpointError("the step has ended"))
            self._takes, self._voted = False, True
            asks = reduced and self.heal.abandoned is None and not self._failed
            self._decision = Abandon()
        self._hyperparameters = self._committed_with() if asks else None
        with self._cond:
            if self._hyperparameters is not None:
                self.heal.applied()
        self.steps_too(optimizer)

    def steps_too(self, optimizer: Optional[Optimizer]) -> None:
        """Applies the gradients of another optimizer, which shares the vote."""
        with self._cond:
            if self._hyperparameters is not None:
                self.wrote = True
                only = optimizer if self._several else None
                self.parameters.step(self.heal.here, self._hyperparameters, only)
            self.parameters.side_stream.mark()  # device work of the request thread follows this thread's

    @property
    def _several(self) -> bool:
        return len(self.parameters.given) > 1

    def _committed_with(self) -> Optional[Json]:
        """The hyperparameters with which the source has committed the current step; None: it has not, or that
        is not known. It is worth the wait: the next quorum begins only when the source has asked for it.
        """
        plan = self._plan
        assert plan is not None and self._decision is not None
        try:
            return self.transport.recv_decision(
                metadata=self._address(plan),
                step=plan.max_step,
                quorum_id=plan.quorum_id,
                timeout=timedelta(seconds=min(self.timeout, _SILENT_SEC)),
                abandon=self._decision,
            )
        except Exception as e:
            self.logger.info(f"it is not known whether the source has committed step {plan.max_step}: {e}")
            return None
        finally:
            self._decision = None

    # The request thread

    def _asks(self) -> bool:
        """Whether there are requests in this step."""
        return self._open and self.heal.abandoned is None and not self.heal.ends and not self._failed

    def _run(self) -> None:
        while (found := self._next()) is not None:
            ask, plan, request = found
            began = time.monotonic()
            try:
                self._receive(ask, plan, request)
            except Exception as e:
                with self._cond:
                    self._refused(plan, e)
            with self._cond:
                self._request = None
                self.pace.spent(began, time.monotonic())
                self._cond.notify_all()

    def _next(self) -> Optional[tuple[Ask, Plan, Abandon]]:
        """Waits for the next request; None: the heal in passing has ended."""
        with self._cond:
            while not self._over:
                pause: Optional[float] = None
                ask = self.heal.next()
                if self._asks() and not ask.empty:
                    now = time.monotonic()
                    pause = max(self.pace.pause(now), self._again_at - now)
                    if pause <= 0:
                        assert self._plan is not None
                        self._request = Abandon()
                        return ask, self._plan, self._request
                self._cond.wait(pause)
            return None

    def _receive(self, ask: Ask, plan: Plan, request: Abandon) -> None:
        began = time.monotonic()
        part = self.transport.recv_part(
            metadata=self._address(plan),
            step=plan.max_step,
            key=ask.key,
            timeout=timedelta(seconds=min(self.timeout, _SILENT_SEC)),
            memory=partial(self._begin, ask),
            abandon=request,
        )
        with self._cond:
            request.check("a part of the state")
            if self._plan is plan and self._takes:
                self._take(ask, part, time.monotonic() - began)

    def _address(self, plan: Plan) -> str:
        """Where the assigned source offers its state."""
        assert plan.source is not None
        source, (known, address) = plan.source.manager_address, self._located
        if source != known:
            locate = self._locate()
            if locate is None:
                raise CheckpointError("the Manager of this heal no longer exists")
            address = locate(source)
            self._located = source, address
        return address

    def _begin(self, ask: Ask, value: Any, nbytes: int) -> torch.Tensor:
        """Takes up the description of a part that begins to arrive. Returns the memory for it."""
        if value["layout"] != self.parameters.layout:
            raise Unsupported("parameters or optimizers differ from the source's")
        self.parameters.sizes(ask.begin, ask.end, value["states"], nbytes)  # before there is memory for it
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

    def _refused(self, plan: Plan, error: Exception) -> None:
        if self._plan is not plan or not self._open:
            return
        if isinstance(error, Unsupported):
            self.heal.abandon(str(error))
        elif isinstance(error, RequestRefused) and error.status not in _OF_THIS_STEP:
            self.heal.abandon(f"the source: {error}")
        else:
            self.logger.info(f"a request for a part of the state failed: {error}")
            pause = error.retry_after if isinstance(error, Busy) else _RETRY_SEC
            self._again_at = time.monotonic() + pause
