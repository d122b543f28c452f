"""The trainer's record of an operation in the worker: the threads that wait for it, and its result."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any, Generator, Optional, Sequence

import torch

from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.sharing import Registration
from torchft.utils import get_stream_context


class WorkerFailed(RuntimeError):
    """The worker's process ended without sending an error."""


@dataclass
class _FutureMetadata:
    """The future of an operation, and the stream on which it is completed."""

    future: torch.futures.Future[object]
    stream: Optional[torch.Stream]

    @contextlib.contextmanager
    def set_stream(self) -> Generator[None, None, None]:
        """Makes the future's stream the current one."""
        with get_stream_context(self.stream):
            yield


class _OpMetadata:
    """An operation that the trainer sent to the worker.

    Args:
        op_id: number of the operation.
        registrations: (device, registration) of every tensor.
        result: value of the operation's future: the caller's tensors.
        timeout_sec: seconds without an answer after which the worker is checked.
        stream: the current stream at the call.
    """

    def __init__(
        self,
        op_id: int,
        registrations: list[tuple[int, Registration]],
        result: Any,
        timeout_sec: float,
        stream: Optional[torch.Stream] = None,
    ) -> None:
        self.op_id = op_id
        self.registrations = registrations
        self.result = result
        self.timeout_sec = timeout_sec
        self.stream = stream
        self.started = time.monotonic()
        self.done = False
        self.ended = threading.Event()  # set after `done`
        self.error: Optional[Exception] = None
        # Events on the worker's device that follow the operation; assigned when the worker has answered.
        self.marks: Sequence[protocol.Item] = ()
        self.future: Optional[_FutureMetadata] = None
        # Ends the worker if a stream waits too long for the operation.
        self.timer: Any = None

    def end_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    @contextlib.contextmanager
    def set_stream(self) -> Generator[None, None, None]:
        """Makes the stream of the call the current one."""
        with get_stream_context(self.stream):
            yield


def release(op: _OpMetadata) -> None:
    """Ends the sharing of the operation's tensors with the worker, which has finished it."""
    op.end_timer()
    registrations, op.registrations = op.registrations, []
    for _, registration in registrations:
        registration.release()


def timed_out(seconds: Optional[float]) -> Exception:
    return RuntimeError(f"Operation timed out: it did not complete within {seconds} s")
