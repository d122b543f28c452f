"""Host memory for received tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Optional

import torch

from torchft.checkpointing.transport import CheckpointError

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
