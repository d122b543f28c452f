"""Receives tensors for a device by windows, through two blocks of host memory; see go/heal/windows.go."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Dict, List, Sequence

import torch

from torchft.checkpointing.memory import staging
from torchft.checkpointing.memory.staging import StreamCopies, copies_for
from torchft.checkpointing.native.core import NativeFetch
from torchft.checkpointing.transport import CheckpointError
from torchft.utils import DeviceEvent


class StagedReceive:
    """The regions of a transfer that are on a device. Only verified data is written to them.

    Args:
        regions: all regions of the transfer, as flat tensors of bytes
        block_size: size of a block on the network, in bytes
    """

    def __init__(self, regions: Sequence[torch.Tensor], block_size: int, what: str) -> None:
        starts = accumulate((region.numel() for region in regions), initial=0)
        self._regions = [(start, region) for start, region in zip(starts, regions) if is_staged(region)]
        self._what = what
        self.window = max(1, staging.BLOCK // block_size)  # blocks of the network
        self._nbytes = self.window * block_size
        self._at: Dict[int, torch.Tensor] = {}  # open windows
        self._under_way: List[DeviceEvent] = []
        self._free: List[torch.Tensor] = []
        # Created after the memory, so that copies come after the work that used this memory before.
        self._copies: Dict[torch.device, StreamCopies] = {}
        for device in {region.device for _, region in self._regions}:
            kind = copies_for(device.type)
            assert kind is not None  # because is_staged(region)
            self._copies[device] = kind(device)
        for copies in list(self._copies.values())[:1]:
            try:
                self._free = [copies.block(self._nbytes) for _ in range(2)]
            except (RuntimeError, MemoryError) as error:
                raise CheckpointError(
                    f"{what}: no memory for blocks of {self._nbytes} bytes: {error}"
                ) from error

    def begin(self, fetch: NativeFetch) -> None:
        """Opens the first windows."""
        self._open(fetch, self._free)

    def take(self, fetch: NativeFetch, windows: List[int]) -> None:
        """Copies full windows to the device, and opens the next ones. CheckpointError: the device failed."""
        blocks = [self._at.pop(window) for window in windows]
        try:
            for window, block in zip(windows, blocks):
                self._start(window * self._nbytes, block)
            self._wait()
        except RuntimeError as error:
            raise CheckpointError(f"{self._what}: it could not be copied to the device: {error}") from error
        self._open(fetch, blocks)

    def _open(self, fetch: NativeFetch, blocks: List[torch.Tensor]) -> None:
        for block in blocks:
            window = fetch.stage(block)
            if window >= 0:
                self._at[window] = block

    def _start(self, begin: int, block: torch.Tensor) -> None:
        """Queues the copies of a block, which contains the transfer's bytes from `begin` on."""
        for start, region in self._regions:
            first, end = max(start, begin), min(start + region.numel(), begin + self._nbytes)
            if first < end:
                target, source = region[first - start : end - start], block[first - begin : end - begin]
                self._under_way.append(self._copies[region.device].start(target, source))

    def _wait(self) -> None:
        while self._under_way:
            self._under_way[0].wait(math.inf)
            del self._under_way[0]

    def close(self) -> None:
        """Waits for the copies. Once the fetch has ended too, nothing writes to the device memory."""
        self._wait()


def is_staged(region: torch.Tensor) -> bool:
    """Whether a region is received through blocks of host memory."""
    return copies_for(region.device.type) is not None and region.numel() > 0
