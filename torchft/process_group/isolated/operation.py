"""The trainer's record of an operation in the worker: the threads that wait for it, and its result."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any, Generator, Optional, Sequence

import torch

from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.sharing import Registration
from torchft.utils import get_stream_context


class WorkerFailed(RuntimeError):
    """The worker's process has ended without a word."""


@dataclass
class _FutureMetadata:
    """A future that somebody asked for, and the stream on which it is completed."""

    future: torch.futures.Future[object]
    stream: Optional[torch.Stream]

    @contextlib.contextmanager
    def set_stream(self) -> Generator[None, None, None]:
        """Makes its stream the current one."""
        with get_stream_context(self.stream):
            yield


class _OpMetadata:
    """An operation that was sent to the worker.

    Args:
        op_id: its number.
        registrations: (device, registration) of every tensor.
        result: what its future gives: the caller's tensors.
        timeout_sec: seconds until a silent worker is asked whether it lives.
        stream: the current one when it was called.
    """

    __slots__ = (
        "done", "error", "future", "marks", "op_id", "registrations", "result", "started", "stream", "timeout_sec",
    )  # fmt: skip

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
        self.error: Optional[Exception] = None
        # Of the worker's device, when it is done.
        self.marks: Sequence[protocol.Item] = ()
        self.future: Optional[_FutureMetadata] = None

    @contextlib.contextmanager
    def set_stream(self) -> Generator[None, None, None]:
        """Makes the stream it was called on the current one."""
        with get_stream_context(self.stream):
            yield


def release(op: _OpMetadata) -> None:
    registrations, op.registrations = op.registrations, []
    for _, registration in registrations:
        registration.release()
