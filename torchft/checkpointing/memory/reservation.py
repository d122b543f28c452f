"""Admission of large allocations of host memory, by host.

Eight ranks of a host that look at the free memory at the same moment see the same bytes. So a rank reserves
what it is about to allocate, under a lock of the host, and the reservations of others are no free memory. A
reservation ends when its memory is in use, and so is not free any more, or is not needed.

A reservation is a file of its size; no bytes are written. Its process holds a POSIX lock on the file, which
the kernel releases with the process and does not pass on to its children: a file that another process can
lock is removed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, ClassVar, Optional

_LOCK_SEC = 2.0  # a holder of the lock needs a millisecond, unless it is stopped
_PAUSE_SEC = 0.001
_PARENT = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
folder = _PARENT / f"torchft-memory-{os.getuid()}"  # shared by the processes of a host, or of a container


class NoRoom(Exception):
    """There is not enough memory. The attribute `free` has the number of bytes that are."""

    def __init__(self, free: int) -> None:
        super().__init__(free)
        self.free = free


class Reservation:
    """Memory that this process is about to allocate, until `release`; none without a path."""

    # Of this process, including those that its parent had when it was forked. Closing a file of one's own
    # would release the lock on it.
    own: ClassVar[set[str]] = set()

    def __init__(self, path: Optional[Path] = None, nbytes: int = 0) -> None:
        self._pid = os.getpid()
        self._path = None
        if path is None:
            return
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._path = path
        self.own.add(path.name)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(self._file, nbytes)

    def release(self) -> None:
        """Ends the reservation; may be called again."""
        path, self._path = self._path, None
        if path is not None:
            if self._pid == os.getpid():  # a forked child has none
                path.unlink(missing_ok=True)
            os.close(self._file)
            self.own.discard(path.name)

    def __del__(self) -> None:
        self.release()


def reserve(nbytes: int, free: Callable[[], int], share: int = 1) -> Reservation:
    """Reserves memory.

    Args:
        free: returns the number of bytes that the host has free.
        share: at most one part in so many of the unreserved memory is given.

    Raises:
        NoRoom: that is too little.
        OSError: the folder cannot be used, or its lock was not released in time.
    """
    if nbytes == 0:
        return Reservation()
    with _locked():
        left = max(0, free() - sum(_reserved(path) for path in folder.iterdir())) // share
        if nbytes > left:
            raise NoRoom(left)
        return Reservation(folder / secrets.token_hex(8), nbytes)


def _reserved(path: Path) -> int:
    """The bytes that a file reserves. Removes it if its process has ended."""
    if path.name == "lock":
        return 0
    with suppress(FileNotFoundError):  # released meanwhile
        if path.name in Reservation.own:
            return path.stat().st_size
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except (BlockingIOError, PermissionError):  # POSIX allows both
            return os.fstat(file).st_size
        finally:
            os.close(file)
    return 0


@contextmanager
def _locked() -> Iterator[None]:
    folder.mkdir(mode=0o700, exist_ok=True)
    # Not a POSIX lock, which would not exclude the threads of this process.
    file = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_SEC
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{folder}/lock: timed out, not released within {_LOCK_SEC} s"
                    ) from None
                time.sleep(_PAUSE_SEC)
        yield
    finally:
        os.close(file)
