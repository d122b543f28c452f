"""The interface to a device type: sharing its memory between processes, and ordering the work queued on it.

A trainer and its worker are two processes. The worker must see the trainer's tensors, and neither may touch
them before the other's device has finished with them: both is the task of a `Sharing`, the trainer's end, and
a `Borrowing`, the worker's. Each device type has a module with these functions:

    def trainer(notify: Notify) -> Sharing: ...   # the trainer's end, one for each worker
    def worker() -> Borrowing: ...            # the worker's end
    def prepare(device) -> None: ...          # worker: makes the device current, with a context; not on a CPU
    def share(tensor) -> bool: ...            # optional; trainer: see `ProcessGroup.share_buffer`

`ProcessGroupBaby._sharing` names the module for each `tensor.device.type`. The course of an operation:

    trainer   register(tensor) for each tensor; mark(); the operation is sent with the refs of the
              registrations and the mark
    worker    follow(mark); borrow(ref) for each tensor; the collective; mark(), sent with the answer
    trainer   a waiting thread: fetch() of every registration, follow(mark) on its own current stream, or if
              that is False a poll of reached(mark); release() of every registration as soon as reached(mark)

If the operation fails, fetch is left out. If the worker fails, only free_streams() and close() follow, after
the worker has been reaped: a device may write for a process until that process has ended. Until then,
registrations that were not released keep their memory, even if nothing refers to them; otherwise a later user
of the memory could see it overwritten.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch


class Registration:
    """A tensor of the trainer that the worker may use.

    Args:
        ref: the argument of the worker's `borrow`, a record (see `protocol`): small, as operations have it.
    """

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def fetch(self) -> None:
        """Copies the results into the caller's tensor, if its memory is not shared."""

    def release(self) -> None:
        """Called when the worker no longer uses the tensor."""


# Sends a note from the trainer's end of this device type to the worker's end, in order with the operations,
# optionally with a file descriptor, which the caller still has to close. The worker's end gets the note by
# `notified`. After that the registration is released, if there is one.
Notify = Callable[[Any, Optional[int], Optional[Registration]], None]


class Sharing:
    """The trainer's end. It is used by several threads. A subclass for a device without queued work only
    overrides `register` and `close`.

    A mark is a small record; None where there is nothing to wait for: then neither `follow` nor `reached` is
    called.
    """

    def register(self, tensor: torch.Tensor, read: bool, write: bool) -> Registration:
        """Makes a tensor visible to the worker, which reads or writes it. Its storage is not moved."""
        raise NotImplementedError

    def mark(self) -> Any:
        """Returns a mark behind the work queued on the current stream so far, for the worker's end."""
        return None

    def follow(self, mark: Any) -> bool:
        """Makes the current stream wait for the worker's mark, until `free_streams` at the latest; the host
        continues. False if this device's streams cannot do that: a stream must not wait for an event of a
        process that is killed.
        """
        return True

    def reached(self, mark: Any) -> bool:
        """Whether the device has passed the worker's mark."""
        return True

    def free_streams(self) -> None:
        """Lets streams continue that wait for the worker, which has ended, or should have."""

    def close(self) -> None:
        """Releases everything, also streams; safe to call twice. The worker must have been reaped."""


class Borrowing:
    """The worker's end. It is used by the threads that start and end operations, and ends with the worker."""

    def borrow(self, ref: Any) -> torch.Tensor:
        """Returns the tensor of a registration, given its ref. A storage is imported once and kept."""
        raise NotImplementedError

    def notified(self, note: Any, descriptor: Optional[int]) -> None:
        """Takes up a note of the trainer's end, and closes the descriptor that came with it."""

    def follow(self, mark: Any) -> None:
        """Begins an operation, whose stream waits for the trainer's mark."""

    def mark(self) -> Any:
        """Returns a mark behind the work queued on the current stream so far, for the trainer's end."""
        return None
