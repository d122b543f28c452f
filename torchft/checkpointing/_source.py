"""Which checkpoint is offered at this moment, who reads it, and who waits for the next."""

from __future__ import annotations

import collections
import logging
import threading
import time
from contextlib import contextmanager
from typing import Callable, Counter, Dict, Iterator, Optional

from torchft.checkpointing._checkpoint import FULL, METADATA, Checkpoint

logger: logging.Logger = logging.getLogger(__name__)

_CUT_OFF_TIMEOUT = 10.0  # seconds in which a reader whose connection was cut must end


class WrongStep(Exception):
    """Another step than the one asked for is offered."""


class Unavailable(Exception):
    """Nothing is offered, and the wait for it is over."""


class Source:
    """The one place where requests, the training thread and shutdown meet.

    A checkpoint is offered between `publish` or `allow` and `disallow`. One that is a copy goes on being offered to
    those who ask for its very step, until all of its receivers have it, the next comes, or `keep` seconds have passed.

    Args:
        keep: seconds that a copy is kept after `disallow`
    """

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._cond = threading.Condition()
        self._checkpoint: Optional[Checkpoint] = None
        self._step = -1
        self._allowed = False
        self._closed = False
        self._readers: Dict[object, Callable[[], None]] = {}  # each with what cuts it off
        self._receivers = 0
        self._served: Counter[str] = collections.Counter()
        self._drop_at = float("inf")

    def publish(self, step: int, checkpoint: Checkpoint, receivers: int) -> None:
        """Offers a checkpoint instead of the last one.

        Args:
            step: its step
            checkpoint: the checkpoint
            receivers: how many replica groups will fetch it
        """
        previous = self._checkpoint
        if previous is not None and previous.is_copy:
            previous.join(self._keep)  # a caller that forgot to disallow it may change the tensors now
        with self._cond:  # in one piece: no request may see the new checkpoint under the old step
            self._checkpoint = checkpoint
            self._receivers = receivers
            self._served.clear()
            self.allow(step)

    def allow(self, step: int) -> None:
        """Offers the last checkpoint (again), as that of `step`."""
        with self._cond:
            if self._checkpoint is None:
                raise RuntimeError(f"allow_checkpoint({step}): there is no checkpoint; send_checkpoint comes first")
            self._step = step
            self._allowed = True
            self._drop_at = float("inf")
            self._cond.notify_all()

    def disallow(self, timeout: float) -> None:
        """From its return on, nobody reads the caller's tensors.

        A copy only has to be complete. Otherwise readers get `timeout` seconds to end; then they are cut off, because
        a slow peer must not hold up the training here.

        Raises:
            TimeoutError: the tensors are still in use; they must not be changed
        """
        with self._cond:
            checkpoint = self._checkpoint
            if self._allowed:
                self._allowed = False
                self._drop_at = time.monotonic() + self._keep
            if checkpoint is not None and not checkpoint.is_copy:
                self._end_readers(timeout)
        if checkpoint is not None and checkpoint.is_copy and not checkpoint.join(timeout):
            raise TimeoutError(f"the state of step {self._step} was not copied within {timeout:g} s")
        self.drop_old(time.monotonic())

    def _end_readers(self, timeout: float) -> None:
        if self._cond.wait_for(lambda: not self._readers, timeout):
            return
        logger.warning("%d reader(s) of step %d cut off after %.1f s", len(self._readers), self._step, timeout)
        for cut_off in self._readers.values():
            cut_off()
        if not self._cond.wait_for(lambda: not self._readers, _CUT_OFF_TIMEOUT):
            raise TimeoutError(f"a reader of step {self._step} did not end when its connection was cut")

    def drop_old(self, now: float) -> None:
        """Frees a copy that nobody needs any more."""
        with self._cond:
            checkpoint = self._checkpoint
            if checkpoint is None or self._allowed or not checkpoint.is_copy:
                return
            if now >= self._drop_at or self._all_received(checkpoint):
                self._checkpoint = None

    def _all_received(self, checkpoint: Checkpoint) -> bool:
        chunks = [self._served[str(i)] for i in range(checkpoint.num_chunks)]
        return self._served[FULL] + (min(chunks) if chunks else 0) >= max(1, self._receivers)

    @contextmanager
    def reading(self, step: int, timeout: float, cut_off: Callable[[], None]) -> Iterator[Checkpoint]:
        """The checkpoint of a step, for as long as the block lasts; waits while nothing is offered.

        Args:
            step: the step asked for
            timeout: limit for the wait, in seconds
            cut_off: makes the reader end soon, with an error

        Raises:
            WrongStep: another step is offered
            Unavailable: nothing is offered within `timeout` seconds, or the source is closed
        """
        with self._cond:
            checkpoint = self._wait_for_step(step, timeout)
            reader = object()
            self._readers[reader] = cut_off
        try:
            yield checkpoint
        finally:
            with self._cond:
                del self._readers[reader]
                self._cond.notify_all()

    def _wait_for_step(self, step: int, timeout: float) -> Checkpoint:
        def settled() -> bool:
            return self._closed or self._allowed or self._retained(step)

        in_time = self._cond.wait_for(settled, timeout)
        if self._closed:
            raise Unavailable("this checkpoint server is shut down")
        if not in_time:
            raise Unavailable(
                f"no checkpoint of step {step}: none was allowed for {timeout:g} s (last step offered: {self._step})"
            )
        if self._step != step:
            raise WrongStep(f"invalid checkpoint requested: serving step {self._step} but got step={step}")
        assert self._checkpoint is not None
        return self._checkpoint

    def _retained(self, step: int) -> bool:
        return self._checkpoint is not None and self._checkpoint.is_copy and self._step == step

    def count_served(self, checkpoint: Checkpoint, key: str) -> None:
        """Notes that a peer has a whole stream of this checkpoint."""
        with self._cond:
            if checkpoint is self._checkpoint and key != METADATA:
                self._served[key] += 1
        self.drop_old(time.monotonic())

    def close(self, timeout: float) -> None:
        """Ends every wait and forgets the checkpoint; a copy under way ends within `timeout` seconds."""
        with self._cond:
            checkpoint, self._checkpoint = self._checkpoint, None
            self._closed = True
            self._allowed = False
            self._cond.notify_all()
        if checkpoint is not None:
            checkpoint.cancel()
            checkpoint.join(timeout)
