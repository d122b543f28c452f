"""The offered checkpoint, its readers, and the requests that wait for the next one.

A source may offer the state of a step in parts too. A part is copied when a target requests it, and sent from
the copy, so that a slow target delays no step. The state as a whole is then offered once a target requests
that.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Protocol, Tuple

from torchft.checkpointing.codec.requests import StatePart
from torchft.checkpointing.source.checkpoint import Checkpoint
from torchft.checkpointing.source.offer import Offer
from torchft.checkpointing.transport import Role

logger: logging.Logger = logging.getLogger(__name__)

# Seconds without data after which a reader counts as stuck.
_STUCK_SEC = 2.0


class WrongStep(Exception):
    """The offered step is not the requested one."""


class Unavailable(Exception):
    """Nothing is offered: the wait timed out, the source was closed, or it has no state of this step."""


class NoParts(Exception):
    """The source offers no such part."""


class Parts(Protocol):
    """The state of a step, in parts. Any thread calls it, one at a time, until the step is decided."""

    def part(self, key: str) -> StatePart:
        """A copy of a part; ValueError if there is no such part."""
        ...

    def whole(self) -> None:
        """Offers the state as a whole, by `Publisher.publish`."""
        ...


class Publisher:
    """Coordinates requests, the training thread and shutdown.

    A checkpoint is offered from `publish` or `allow` until `disallow`.

    Args:
        keep: seconds for which `allow` can offer a checkpoint again after `disallow`
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._cond = threading.Condition()
        self._offer: Optional[Offer] = None
        self._step = -1
        self._allowed = False
        self._closed = False
        self._readers = 0
        self._role = Role.ASSIGNED
        self._drop_at = float("inf")
        self._refused: Optional[Tuple[int, str]] = None  # a step without a state to send, and the reason
        self._retired: List[object] = []  # replaced offers, and copies, which `drop_old` frees
        self._parts: Optional[Parts] = None  # None: no part may be read now
        self._reads_parts = False  # whether a request reads them, without the lock
        self._parts_step = -1  # the last step whose parts could be read, or were refused
        self._no_parts = ""  # why they were refused
        # Step and quorum of the attempt that was decided last.
        self._decided: Optional[Tuple[int, int]] = None
        self._decision: Any = None  # on that attempt, a JSON value

    def publish(
        self,
        step: int,
        checkpoint: Checkpoint,
        role: Role = Role.ASSIGNED,
    ) -> None:
        """Offers a checkpoint in place of the previous one.

        Args:
            role: the role of this source. Readers of an additional source also read from the assigned one, so
                `disallow` closes their connections at once
        """
        last = self._offer  # read once: another thread may drop it
        if last is not None:
            # the caller did not disallow the previous one, and may change its tensors now
            last.close(self._keep)
        offer = Offer(checkpoint)
        with self._cond:
            self._role = role
            self._set_offer(step, offer)

    def open(self, step: int, parts: Parts) -> None:
        """Offers the state of a step in parts, until `decide` or `disallow`."""
        with self._closing_parts():
            self._parts, self._parts_step, self._no_parts = parts, step, ""

    def refuse_parts(self, step: int, reason: str) -> None:
        """Answers requests for parts of a step with the reason why there are none."""
        with self._closing_parts():
            self._parts_step, self._no_parts = step, reason

    def decide(self, step: int, quorum_id: int, decision: Any) -> None:
        """Records the decision on an attempt at a step. After it no part of the step is read."""
        with self._closing_parts():
            self._decided, self._decision = (step, quorum_id), decision

    @contextmanager
    def _closing_parts(self) -> Iterator[None]:
        """Waits for the end of a read; no other one begins before the block, which holds the lock."""
        with self._cond:
            self._parts = None
            self._cond.wait_for(lambda: not self._reads_parts)
            yield
            self._cond.notify_all()

    @contextmanager
    def _reading_parts(self) -> Iterator[None]:
        """Releases the lock while the parts are read: the state functions of users may be slow."""
        self._reads_parts = True
        self._cond.release()
        try:
            yield
        finally:
            self._cond.acquire()
            self._reads_parts = False
            self._cond.notify_all()

    def part(self, step: int, key: str, timeout: float) -> StatePart:
        """Returns a part of the state of a step. Waits while the source has not begun that step. NoParts:
        there is none; WrongStep: it is decided already; Unavailable: none in time, or the source is closed.
        """

        def settled() -> bool:
            return self._closed or (step <= self._parts_step and not self._reads_parts)

        with self._cond:
            if not self._cond.wait_for(settled, timeout):
                raise Unavailable(f"timed out after {timeout:g} s: no parts of step {step} were offered")
            if self._closed:
                raise Unavailable("this checkpoint server is shut down")
            if step == self._parts_step and self._no_parts:
                raise NoParts(self._no_parts)
            parts = self._parts
            if step != self._parts_step or parts is None:
                raise WrongStep(f"no part of step {step} is offered any more")
            try:
                with self._reading_parts():
                    return parts.part(key)
            except ValueError as error:
                raise NoParts(str(error)) from error

    def decision(self, step: int, quorum_id: int, timeout: float) -> Any:
        """Waits for the decision on an attempt; None: this source does not know it. Unavailable: there was
        none in time, or the source is closed.
        """
        attempt = step, quorum_id
        with self._cond:
            known = self._cond.wait_for(
                lambda: self._closed or (self._decided is not None and self._decided >= attempt), timeout
            )
            if self._closed or not known:
                raise Unavailable(f"it is not known whether step {step} was committed")
            return self._decision if self._decided == attempt else None

    def refuse(self, step: int, reason: str) -> None:
        """Answers requests for a step with the reason why it has no state."""
        with self._cond:
            self._refused = step, reason
            self._cond.notify_all()

    def allow(self, step: int) -> None:
        """Offers the previous checkpoint again: its tensors with their present content, as the state of
        `step`. RuntimeError: there is none, or it was dropped.
        """
        with self._cond:
            last = self._offer
            if last is None:
                raise RuntimeError(
                    f"allow_checkpoint({step}): there is no checkpoint; send_checkpoint comes first"
                )
            if self._allowed:
                self._step = step
                return
        offer = Offer(last.checkpoint)
        with self._cond:
            self._set_offer(step, offer)

    def _set_offer(self, step: int, offer: Offer) -> None:
        if self._closed:
            offer.close(self._keep)
            return
        if self._offer is not None:
            self._retired.append(self._offer)
        self._offer = offer
        self._step = step
        self._allowed = True
        self._refused = None
        self._drop_at = float("inf")
        self._cond.notify_all()

    def disallow(self, timeout: float) -> None:
        """Returns the tensors to the caller: after this call no reader uses them.

        It waits at most `timeout` seconds until no reader is left, and only as long as readers take data: a
        peer that hangs must not delay training on this replica group. An additional source does not wait.
        Then the connections of readers that still use the tensors are closed.

        Raises:
            TimeoutError: the tensors are still in use; they must not be changed
        """
        with self._closing_parts():
            offer = self._offer
            if offer is None:
                return
            if self._allowed:
                self._allowed = False
                self._drop_at = time.monotonic() + (self._keep if self._role is Role.ASSIGNED else 0.0)
                if self._role is Role.ASSIGNED:
                    self._await_readers(offer, timeout)
        offer.close(timeout)
        if copy := offer.take_copy():
            with self._cond:
                self._retired.append(copy)

    def _await_readers(self, offer: Offer, timeout: float) -> None:
        deadline, before = time.monotonic() + timeout, -1
        while not self._cond.wait_for(
            lambda: self._readers == 0, min(_STUCK_SEC, deadline - time.monotonic())
        ):
            served, before = before, offer.served
            if before == served or time.monotonic() >= deadline:
                return

    def drop_old(self, now: float) -> None:
        """Frees replaced checkpoints and copies, and a checkpoint whose time is over.

        Called on background threads, because returning much memory to the system takes a while.
        """
        unneeded: List[object] = []  # freed after the lock is released
        with self._cond:
            unneeded += self._retired
            self._retired.clear()
            if not self._allowed and now >= self._drop_at:
                unneeded.append(self._offer)
                self._offer = None

    @contextmanager
    def reading(self, step: int, timeout: float) -> Iterator[Offer]:
        """Yields the checkpoint of a step, which stays readable in the block. Waits while nothing is offered.

        Raises:
            WrongStep: another step is offered
            Unavailable: nothing is offered in time, or the source is closed
        """
        with self._cond:
            offer = self._wait_for_step(step, timeout)
            self._readers += 1
        try:
            yield offer
        finally:
            with self._cond:
                self._readers -= 1
                self._cond.notify_all()
            self.drop_old(time.monotonic())

    def _wait_for_step(self, step: int, timeout: float) -> Offer:
        def refused() -> bool:
            return self._refused is not None and self._refused[0] == step

        def in_parts() -> bool:
            return self._parts is not None and self._parts_step == step

        def settled() -> bool:
            return self._closed or self._allowed or refused() or (in_parts() and not self._reads_parts)

        in_time = self._cond.wait_for(settled, timeout)
        parts = self._parts
        if not (self._closed or self._allowed or self._reads_parts) and parts is not None and in_parts():
            with self._reading_parts():
                parts.whole()
        if self._closed:
            raise Unavailable("this checkpoint server is shut down")
        if self._refused is not None and refused():
            raise Unavailable(f"the source cannot send its state of step {step}: {self._refused[1]}")
        if not in_time:
            raise Unavailable(
                f"no checkpoint of step {step}: none was allowed for {timeout:g} s (last step offered: "
                f"{self._step})"
            )
        if self._step != step:
            raise WrongStep(f"invalid checkpoint requested: serving step {self._step} but got step={step}")
        assert self._offer is not None
        return self._offer

    def close(self, timeout: float) -> None:
        """Ends every wait and drops the checkpoint. A copy in progress ends within `timeout` seconds."""
        with self._cond:
            offer, self._offer = self._offer, None
            self._closed = True
            self._allowed = False
            self._parts = None
            self._cond.notify_all()
        if offer is not None:
            try:
                offer.close(timeout)
            except TimeoutError as error:
                logger.warning("shutdown: %s", error)
