"""The trainer's record of an operation in the worker: its tensors, its request, and its result."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Callable, Generator, Optional, Sequence

import torch

from torchft.process_group._timeout import given_timeout
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.sharing import Registration, Sharing
from torchft.utils import get_stream_context, refuse_capture


class WorkerFailed(RuntimeError):
    """The worker's process ended without sending an error."""


class WorkerTimedOut(TimeoutError, RuntimeError):
    """The worker did not answer in time."""


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
    """An operation for the worker. After `timeout_sec` seconds without an answer the worker is checked."""

    def __init__(self, timeout_sec: float) -> None:
        # Number of the operation in its channel.
        self.op_id = 0
        self.timeout_sec = timeout_sec
        # The trainer's end for the device of its tensors, and the device's number in a record; None: it has
        # no tensors.
        self.sharing: Optional[Sharing] = None
        self.device = 0
        self.registrations: list[Registration] = []  # of every tensor
        # The operation's record, see `protocol.encode_call`.
        self.call = b""
        # Value of the operation's future, the same as with Gloo: its outputs, one after another.
        self.result: list[torch.Tensor] = []
        # The current stream at the call; None if there are only CPU tensors.
        self.stream: Optional[torch.Stream] = None
        self.started = time.monotonic()
        self.done = False
        # Held until the operation has ended: cheaper than an event.
        self._running = threading.Lock()
        self._running.acquire()
        self.error: Optional[Exception] = None
        # The mark on the worker's device behind the operation, set with its answer; None: it has finished.
        self.mark: Any = None
        self.future: Optional[_FutureMetadata] = None
        # Ends the worker if a stream waits too long for the operation.
        self.timer: Any = None

    def end(self) -> None:
        """Ends all waits."""
        self.done = True
        self._running.release()

    def wait(self, timeout: Optional[float]) -> bool:
        """Waits until the operation has ended; False if that takes longer than `timeout` seconds."""
        left = threading.TIMEOUT_MAX if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
        if not self.done and self._running.acquire(timeout=left):
            self._running.release()
        return self.done

    def end_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def release(self) -> None:
        """Ends the sharing of the operation's tensors with the worker, which has finished it."""
        self.end_timer()
        registrations, self.registrations = self.registrations, []
        for registration in registrations:
            registration.release()

    def follow(self) -> bool:
        """Makes the current stream wait for the worker's device; False if only the host can."""
        return self.sharing is None or self.mark is None or self.sharing.follow(self.mark)

    def reached(self) -> bool:
        """Whether the worker's device has finished the operation, which has ended here."""
        return self.sharing is None or self.mark is None or self.sharing.reached(self.mark)

    @contextlib.contextmanager
    def set_stream(self) -> Generator[None, None, None]:
        """Makes the stream of the call the current one."""
        with get_stream_context(self.stream):
            yield


def operation(
    sharing: Callable[[int], Sharing],
    group: str,
    name: str,
    arguments: Sequence[Any],
    access: Optional[str],
    timeout: timedelta,
) -> _OpMetadata:
    """Makes an operation and registers its tensors.

    Args:
        sharing: the trainer's end for a device, which registers tensors.
        access: which tensors the operation reads and writes, if that differs from `protocol.OPERATIONS`.

    Raises:
        Exception: the operation cannot be sent; no tensor is registered then.
    """
    # The last argument is options, or for send and recv a number.
    own = getattr(arguments[-1], "timeout", timedelta(0))
    op = _OpMetadata((own if own > timedelta(0) else given_timeout() or timeout).total_seconds())

    given = access

    def register(tensor: torch.Tensor, access: str) -> Any:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{tensor!r} is no tensor")
        kind = tensor.device.type
        if kind not in protocol.DEVICES:
            raise RuntimeError(f"a tensor on {tensor.device} is not supported")
        device = protocol.DEVICES.index(kind)
        if op.sharing is None:
            op.device, op.sharing = device, sharing(device)
        elif device != op.device:
            raise RuntimeError(f"tensors on {protocol.DEVICES[op.device]} and {kind}: one device is needed")
        access = given or access
        registration = op.sharing.register(tensor, "r" in access, "w" in access)
        op.registrations.append(registration)
        return registration.ref

    try:
        try:
            op.call = protocol.encode_call(name, arguments, register)
        except Exception as e:
            # so that the error names the group and the operation
            kind = type(e) if type(e) in (TypeError, ValueError, NotImplementedError) else RuntimeError
            raise kind(f"{group}: {name}: {e}") from e
        if op.device:
            refuse_capture(f"{group}: {name}")
    except Exception:
        op.release()
        raise
    if op.registrations:
        protocol.each(protocol.OPERATIONS[name][0], op.result.append, arguments[0])
    if op.device:
        op.stream = torch.accelerator.current_stream()
    return op


def timed_out(seconds: Optional[float]) -> Exception:
    return RuntimeError(f"Operation timed out: it did not complete within {seconds} s")
