"""Admission of large allocations of host memory, by host.

Eight ranks of a host that look at the free memory at the same moment see the same bytes. So a rank reserves
what it is about to allocate, under a lock of the host, and the reservations of others are no free memory. A
reservation ends when its memory is in use, and so is not free any more, or is not needed.

A reservation is a locked file of its size; no bytes are written. The kernel releases the lock with the
process: a file that another process can lock is removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from sys import maxsize
from typing import BinaryIO, Optional

from torchft.checkpointing.transport import CheckpointError
from torchft.utils import poll

logger: logging.Logger = logging.getLogger(__name__)

_LOCK_SEC = 2.0  # a holder of the lock needs a millisecond, unless it is stopped
_PARENT = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
folder = _PARENT / f"torchft-memory-{os.getuid()}"  # shared by the processes of a host, or of a container


class NoRoom(Exception):
    """There is not enough memory. The attribute `free` has the number of bytes that are."""

    def __init__(self, free: int) -> None:
        super().__init__(free)
        self.free = free


class Reservation:
    """Memory that this process is about to allocate, until `release`; none without a path."""

    def __init__(self, path: Optional[Path] = None, nbytes: int = 0) -> None:
        self._pid, self._path = os.getpid(), None
        if path is not None:
            self._file = path.open("xb")
            self._path = path
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.truncate(nbytes)

    def release(self) -> None:
        """Ends the reservation; may be called again."""
        path, self._path = self._path, None
        if path is not None:
            if self._pid == os.getpid():  # a forked child has none
                path.unlink(missing_ok=True)
            self._file.close()

    def __del__(self) -> None:
        self.release()


def reserve(nbytes: int, share: int = 1) -> Reservation:
    """Reserves host memory that is about to be allocated.

    Args:
        share: at most one part in so many of the free memory is given

    Raises:
        NoRoom: there is not enough that other processes have not reserved
    """
    if nbytes == 0:
        return Reservation()
    try:
        with _locked():
            left = max(0, available_memory() - sum(_reserved(path) for path in folder.iterdir())) // share
            if nbytes <= left:
                return Reservation(folder / secrets.token_hex(8), nbytes)
    except OSError as error:  # the other ranks of this host look at the same bytes
        logger.warning("memory cannot be reserved, so it is divided among the ranks of this host: %s", error)
        left = available_memory() // share // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        if nbytes <= left:
            return Reservation()
    raise NoRoom(left)


def reserve_for_state(nbytes: int, what: str) -> Reservation:
    """Reserves host memory for a state on devices at the source; CheckpointError if it does not fit."""
    try:
        return reserve(nbytes)
    except NoRoom as error:
        raise CheckpointError(
            f"{what}: {nbytes} bytes of it are on a device at the source, and this host has {error.free} "
            "free for them that no other rank has reserved; with use_async_quorum=False they are received in "
            "place where another group has them too"
        ) from None


def _reserved(path: Path) -> int:
    """The bytes that a file reserves. Removes it if its process has ended."""
    if path.name == "lock":
        return 0
    with suppress(FileNotFoundError), path.open("rb") as file:  # released meanwhile
        if not _takes_lock(file):
            return os.fstat(file.fileno()).st_size
        path.unlink()
    return 0


def _takes_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


@contextmanager
def _locked() -> Iterator[None]:
    folder.mkdir(mode=0o700, exist_ok=True)
    with (folder / "lock").open("ab") as file:
        if not poll(lambda: _takes_lock(file), _LOCK_SEC):
            raise TimeoutError(f"{folder}/lock: timed out, not released within {_LOCK_SEC} s")
        yield


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be allocated before the host or this container runs out; sys.maxsize if that is unknown.

    Args:
        proc: the mount point of procfs
        cgroup: the directory of the container's limit (version 2, else version 1)
    """
    limits = [_host_available(proc), _cgroup_available(cgroup, "memory.max", "memory.current")]
    limits.append(_cgroup_available(cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return min((limit for limit in limits if limit is not None), default=maxsize)


def _host_available(proc: Path) -> Optional[int]:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_available(folder: Path, limit_file: str, usage_file: str) -> Optional[int]:
    try:
        limit = (folder / limit_file).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_file).read_text())
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                usage -= int(line.split()[1])  # page cache that the kernel frees on demand
                break
        return max(0, int(limit) - usage)
    except (OSError, ValueError, IndexError):
        return None
