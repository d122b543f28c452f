"""csrc/isolated.c and csrc/ending.c"""

from typing import Any, Callable, Optional

from torch.futures import Future

def copy(to: int, source: int, size: int, /) -> None:
    """Copies memory, given by addresses. Of what is large, other threads of Python run meanwhile."""

def send(socket: int, kind: int, operation: int, /, *parts: bytes) -> bool:
    """Sends a request; False when the other end does not read.

    Raises:
        OSError: the other end is closed.
        ValueError: it is longer than a socket takes.
    """

def read(answers: int, wake: int, milliseconds: int, /) -> int | bytes | None:
    """Waits for answers.

    Returns:
        The number of an operation, when what came is that it is done, and nothing else; other answers as bytes, b""
        from a worker that has ended; None when nothing came in that time, or `wake` (an eventfd) did.
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
    """Writes to `answers` that the operation is done when the future has a value; else calls `failed`.

    After that `in_flight` loses the operation.
    """

def stop_threads_that_come_back() -> None:
    """A thread that comes back from C++ when the interpreter ends stands still, and does not abort the process."""
