"""csrc/isolated.c and csrc/ending.c"""

from typing import Any, Callable, Optional

from torch.futures import Future

def copy(to: int, source: int, size: int, /) -> None:
    """Copies memory between two addresses. During a large copy, other threads of Python run."""

def send(socket: int, kind: int, operation: int, /, *parts: bytes) -> bool:
    """Sends a request; False if the other end does not read.

    Raises:
        OSError: the other end is closed.
        ValueError: the request is longer than a socket takes.
    """

def read(answers: int, wake: int, milliseconds: int, /) -> int | bytes | None:
    """Waits for answers.

    Returns:
        The number of an operation if the only answer is that this operation is done. Other answers as bytes; b"" if the
        worker has ended. None if no answer came in that time, or `wake` (an eventfd) became readable.
    """

def receive(socket: int, /) -> tuple[int, int, Optional[bytes], tuple[int, ...]]:
    """Waits for the next request: its kind, operation, rest and descriptors.

    The rest is None when the other end is closed. A message shorter than a request comes with the kind 0.
    """

def answer_when_done(
    future: Future[Any],
    answers: int,
    operation: int,
    in_flight: dict[int, Any],
    failed: Callable[[int, Exception], None],
    /,
) -> None:
    """When the future has a value, writes to `answers` that the operation is done; when it has an error, calls
    `failed`. After that the operation is removed from `in_flight`.
    """

def stop_threads_that_come_back() -> None:
    """Makes a thread that returns from C++ while the interpreter ends sleep, so that it does not abort the process."""
