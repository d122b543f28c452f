"""Admission of large allocations of host memory, by host.

Eight ranks of a host that look at the free memory at the same moment see the same bytes. So a rank reserves what it is
about to allocate, under a lock of the host, and the reservations of others are no free memory. A reservation ends when
its memory is in use, and so is not free any more, or is not needed.

Each process with reservations has a file whose size is their sum; no bytes are written. It holds a lock on the file,
which the kernel releases with the process: whoever can lock the file of another one removes it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Optional

_LOCK_SEC = 2.0  # a holder of the lock needs a millisecond, unless it is stopped
_PAUSE_SEC = 0.001


class NoRoom(Exception):
    """There is not enough memory. The attribute `free` has the number of bytes that are."""

    def __init__(self, free: int) -> None:
        super().__init__(free)
        self.free = free


class Reservation:
    """Memory that this process is about to allocate, until `release`."""

    def __init__(self, host: Host, nbytes: int) -> None:
        self._host = host
        self._nbytes = nbytes
        self._pid = os.getpid()

    def release(self) -> None:
        """Ends the reservation; may be called again."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes and self._pid == os.getpid():  # a forked child has none
            self._host._add(-nbytes)

    def __del__(self) -> None:
        self.release()


class Host:
    """The reservations of a host, or of a container.

    Args:
        folder: is shared by the processes, and is made if there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reset()
        os.register_at_fork(after_in_child=self._forget)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # the garbage collector may release on a thread that holds it
        self._file: Optional[int] = None
        self._path = self._folder / "lock"
        self._reserved = 0

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)  # else the lock on it would outlive the parent
        self._reset()

    def reserve(self, nbytes: int, free: Callable[[], int], share: int = 1) -> Reservation:
        """Reserves memory.

        Args:
            nbytes: number of bytes.
            free: returns the number of bytes that the host has free.
            share: at most one part in so many of the unreserved memory is given.

        Raises:
            NoRoom: that is too little.
            OSError: the folder cannot be used, or its lock was not released in time.
        """
        with self._lock, self._locked():
            left = max(0, free() - self._reserved - self._others()) // share
            if nbytes > left:
                raise NoRoom(left)
            if self._file is None:
                self._path = self._folder / secrets.token_hex(8)
                self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._add(nbytes)
            return Reservation(self, nbytes)

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self._reserved += nbytes
            if self._file is None:
                return
            with suppress(OSError):
                if self._reserved:
                    os.ftruncate(self._file, self._reserved)
                else:
                    self._path.unlink()
            if not self._reserved:
                os.close(self._file)
                self._file = None

    def _others(self) -> int:
        total = 0
        for path in self._folder.iterdir():
            if path.name in ("lock", self._path.name):
                continue
            try:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:  # released meanwhile
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                total += os.fstat(file).st_size
            else:
                path.unlink(missing_ok=True)  # of a process that has ended
            finally:
                os.close(file)
        return total

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        file = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _LOCK_SEC
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TimeoutError(
                            f"{self._folder}/lock: timed out, not released within {_LOCK_SEC} s"
                        ) from None
                    time.sleep(_PAUSE_SEC)
            yield
        finally:
            os.close(file)


def _shared_folder() -> Path:
    memory = Path("/dev/shm")
    parent = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"torchft-memory-{os.getuid()}"


host = Host(_shared_folder())
