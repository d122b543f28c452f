"""Host memory for received tensors, and how much of it this process may still allocate."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from glob import glob
from pathlib import Path
from sys import maxsize
from typing import Optional

import torch

from torchft.checkpointing.memory import reservation
from torchft.checkpointing.memory.reservation import NoRoom, Reservation
from torchft.checkpointing.transport import CheckpointError

logger: logging.Logger = logging.getLogger(__name__)

_OWN = 128 << 10  # bytes; smaller tensors are allocated on the heap
_AREA = 64 << 20  # bytes of an area that tensors share; a larger tensor has a separate area
_ALIGNED = 64  # bytes
_BALLOONS = "/sys/bus/virtio/drivers/virtio_balloon/*/features"
_REPORTING = 5  # the bit VIRTIO_BALLOON_F_REPORTING of the balloon's features (VIRTIO 1.2, section 5.5.3)


@lru_cache(maxsize=1)
def huge_pages() -> Optional[int]:
    """The advice to the kernel about huge pages: to use them, or not where they are slower; None where there
    are none.

    They are slower in a virtual machine whose host takes back free memory (virtio-balloon with the feature
    "free page reporting"): it supplies a block of 2 MB again at 0.4 GB/s when it is used
    (docs/internals/benchmarks.md).
    """
    for features in glob(_BALLOONS):
        with suppress(OSError):
            if Path(features).read_text()[_REPORTING : _REPORTING + 1] == "1":
                return getattr(mmap, "MADV_NOHUGEPAGE", None)
    return getattr(mmap, "MADV_HUGEPAGE", None)  # Linux


class HostMemory:
    """Memory for received tensors: in huge pages, where they are faster.

    The first use of memory in pages of 4 KB takes longer than copying the received bytes there; in pages of 2
    MB it mostly does not (`huge_pages`). Consecutive tensors share an area, since most are smaller than such
    a page. An area is returned to the system with the last of its tensors.
    """

    def __init__(self) -> None:
        self._area: Optional[mmap.mmap] = None
        self._used = 0
        self._prepared: dict[int, list[torch.Tensor]] = {}  # by size

    def prepare(self, sizes: Iterable[int]) -> None:
        """Allocates tensors of these sizes in bytes for later calls of `take`, and uses all pages."""
        for tensor in [self.take(nbytes).zero_() for nbytes in sizes]:
            self._prepared.setdefault(tensor.nbytes, []).append(tensor)

    def take(self, nbytes: int) -> torch.Tensor:
        """Allocates a flat tensor of zero bytes, with a separate storage; a page is filled when it is first
        used. RuntimeError, MemoryError: there is not enough memory.
        """
        if prepared := self._prepared.get(nbytes):
            return prepared.pop()
        if nbytes > maxsize:
            raise MemoryError(f"{nbytes} bytes")
        if nbytes < _OWN:
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        if self._area is None or self._used + nbytes > len(self._area):
            try:
                self._area = mmap.mmap(-1, max(nbytes, _AREA), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError) as error:
                raise MemoryError(str(error)) from error
            self._used = 0
            if (advice := huge_pages()) is not None:
                with suppress(OSError):  # the kernel does not support huge pages
                    self._area.madvise(advice)
        taken = torch.frombuffer(self._area, dtype=torch.uint8, count=nbytes, offset=self._used)
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        return taken


def flat_storage(nbytes: int, what: str, device: torch.device, memory: HostMemory) -> torch.Tensor:
    """Allocates memory for a region.

    Raises:
        CheckpointError: there is not enough memory, or no such device
    """
    try:
        return (
            memory.take(nbytes)
            if device.type == "cpu"
            else torch.empty(nbytes, dtype=torch.uint8, device=device)
        )
    # AssertionError: PyTorch was built without support for the device
    except (RuntimeError, MemoryError, AssertionError) as error:
        where = "" if device.type == "cpu" else f" on {device}: {error}"
        raise CheckpointError(f"{what}: no memory for a tensor of {nbytes} bytes{where}") from error


def reserve(nbytes: int, share: int = 1) -> Reservation:
    """Reserves host memory that is about to be allocated.

    Args:
        share: at most one part in so many of the free memory is given

    Raises:
        NoRoom: there is not enough that other processes have not reserved
    """
    try:
        return reservation.reserve(nbytes, available_memory, share)
    except OSError as error:  # the other ranks of this host look at the same bytes
        logger.warning("memory cannot be reserved, so it is divided among the ranks of this host: %s", error)
        left = available_memory() // share // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
        if nbytes > left:
            raise NoRoom(left) from None
        return Reservation()


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
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
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
