"""Transfers of the native core (go/heal): memory registered with it, and what keeps that memory alive."""

from __future__ import annotations

import json
import logging
import struct
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, Sequence, Tuple

from torchft.checkpointing.transport import Role

if TYPE_CHECKING:
    import torch

logger: logging.Logger = logging.getLogger(__name__)

ON_DEVICE = -1  # stands for the address of memory on a device, which is copied through memory of this host

_US = 1_000_000
_STALL = 10.0  # seconds after which a stream that receives nothing is closed
_REVOKE_TIMEOUT = 10  # seconds within which a cut stream must end

# Owners of memory that a transfer may still write to. They stay here until the transfer has ended: an
# interrupted wait must not free memory that a stream is writing to.
_registered: Dict[int, object] = {}


def native() -> Any:
    """Returns the native library; None if it is not built, or was loaded before this process was forked."""
    try:
        from torchft._torchft import _load

        library = _load()
    except ImportError as error:
        logger.debug("checkpoints move without the native core: %s", error)
        return None
    return None if library.forked() else library


def _pairs(regions: Sequence[Tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("=qq", address, nbytes) for address, nbytes in regions)


class _Handle:
    """An object in the native core. It is ended by `end`, or when its last Python reference is dropped."""

    _handle = 0
    _end = ""  # name of the function that ends the object

    def __init__(self, go: Any) -> None:
        self._go = go

    def end(self) -> None:
        handle, self._handle = self._handle, 0
        if handle:
            self._go.run(getattr(self._go, self._end), handle)

    def close(self) -> None:
        self.end()

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and not self._go.forked():
            self.end()


class NativeServer(_Handle):
    """Serves offers on a separate port, from the first request of a target on. A target must take each piece
    within `piece_timeout` seconds; `bytes_per_second` bounds all targets together (0: no limit).
    """

    _end = "pyapi_ReleaseStart"

    def __init__(self, piece_timeout: float, bytes_per_second: int, background: bool) -> None:
        self._settings = int(piece_timeout * _US), bytes_per_second, background
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> bool:
        """Starts the server if it does not run. Returns False if it cannot run, or has ended."""
        with self._lock:
            if not self._handle and not self._closed and (go := native()) is not None:
                self._go = go
                go.open(self, go.pyapi_HealServerStart, *self._settings)
                self.port: int = go.pyapi_HealPort(self._handle)
            return self._handle != 0

    def end(self) -> None:
        with self._lock:
            self._closed = True
            super().end()

    def offer(self, regions: Sequence[Tuple[int, int]], owner: object) -> NativeOffer:
        """Offers memory: addresses (or ON_DEVICE) and lengths in bytes. The owner is kept until its end."""
        return NativeOffer(self, regions, owner)


class NativeOffer(_Handle):
    _end = "pyapi_HealOfferEndStart"

    def __init__(self, server: NativeServer, regions: Sequence[Tuple[int, int]], owner: object) -> None:
        super().__init__(server._go)
        self.server = server
        self._owners: Dict[object, object] = {None: owner}
        self._handle = self._go.pyapi_HealOffer(self._go.register_memory(_pairs(regions)))
        self.block_size: int = self._go.pyapi_HealBlockSize(self._handle)

    def copied(self, region: int, copy: torch.Tensor, ready: int) -> None:
        """Reports that the first `ready` bytes of a region can be read from the given copy."""
        self._owners[region] = copy
        self._go.pyapi_HealCopied(self._handle, region, copy.data_ptr(), ready)

    def copy_failed(self, reason: str) -> None:
        """Reports that copying from the device failed; requests that wait for the copy fail so."""
        self._go.pyapi_HealCopyFailed(self._handle, reason)

    def revoke(self, grace: float) -> None:
        """Withdraws the memory that was not copied. Streams that still read it after `grace` seconds are
        closed. TimeoutError: the memory is still in use.
        """
        if not self._handle:
            return
        us = int(_REVOKE_TIMEOUT * _US)
        if not self._go.run(self._go.pyapi_HealRevokeStart, self._handle, int(grace * _US), us):
            raise TimeoutError("timed out: a stream of the checkpoint did not end when it was cut")

    def end(self) -> None:
        super().end()
        self._owners.clear()

    def grant(self) -> Grant:
        """Allows one target to read."""
        return Grant(self._go, self._go.pyapi_HealGrant(self.server._handle, self._handle))


class Grant(_Handle):
    _end = "pyapi_ReleaseStart"

    def __init__(self, go: Any, handle: int) -> None:
        super().__init__(go)
        self._handle = handle

    @property
    def secret(self) -> str:
        return self._go.pyapi_HealSecret(self._handle)

    @property
    def served(self) -> int:
        """The bytes sent to the target."""
        return self._go.pyapi_HealServed(self._handle)


@dataclass
class FetchStatus:
    """The progress of a transfer."""

    done: bool
    running: bool  # whether a source is being read
    received: int  # bytes
    total: int
    digest: str
    failure: str  # why the transfer failed, if no other source can complete it
    full: List[int]  # windows that are ready to be copied to their device
    failed: List[str]  # errors of the sources that ended early


class NativeFetch(_Handle):
    """Fills memory from one or more sources.

    Args:
        regions: addresses (or ON_DEVICE) and lengths in bytes
        block_size: the source's block size, in bytes
        window: blocks in a window, if some of the memory is on a device; see go/heal/windows.go
    """

    _end = "pyapi_HealFetchEndStart"

    def __init__(
        self,
        regions: Sequence[Tuple[int, int]],
        owner: object,
        block_size: int,
        checked: bool,
        window: int,
    ) -> None:
        super().__init__(native())
        memory = self._go.register_memory(_pairs(regions))
        streams = 0  # the core's default
        handle = self._go.pyapi_HealFetch(memory, block_size, streams, checked, int(_STALL * _US), window)
        _registered[handle] = owner
        self._handle = handle

    def add(self, address: str, secret: str, role: Role = Role.ASSIGNED) -> None:
        """Adds a source. An additional one provides only blocks that equal those of the assigned one."""
        self._go.pyapi_HealAdd(self._handle, address, secret, role is Role.ASSIGNED)

    def stage(self, block: torch.Tensor) -> int:
        """Provides memory, to be overwritten, for the next window; returns its number, or -1."""
        return self._go.pyapi_HealStage(self._handle, block.data_ptr(), block.numel())

    def wait(self, seconds: float) -> FetchStatus:
        """Waits until the transfer is settled (done, failed or without a source) or a window is full."""
        us = max(1, int(seconds * _US))
        return FetchStatus(**json.loads(self._go.run(self._go.pyapi_HealWaitStart, self._handle, us)))

    def end(self) -> None:
        """Ends the transfer. After this call nothing writes to the memory."""
        handle = self._handle
        super().end()
        _registered.pop(handle, None)
