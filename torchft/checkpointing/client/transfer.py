"""One transfer of a state into memory, over the native core."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.places import Places
from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.client.request import Abandon
from torchft.checkpointing.client.target import CPU, Homes, TargetState
from torchft.checkpointing.codec.encoding import Path, decode
from torchft.checkpointing.codec.handshake import Structure, Ticket
from torchft.checkpointing.codec.layout import tensor_nodes, tensors_by_path
from torchft.checkpointing.codec.memory import HostMemory, flat_storage, reserve_for_state
from torchft.checkpointing.codec.room import Reservation
from torchft.checkpointing.codec.staging import copies_for
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.native.core import ON_DEVICE, NativeFetch, Status
from torchft.checkpointing.native.landing import Landing, is_staged
from torchft.checkpointing.transport import CheckpointError, Interrupted, Role

_SLICE = 0.5  # seconds between two checks of the progress


class SourceFailed(Interrupted):
    """The source failed during the transfer; a retry may succeed."""


class Transfer:
    """A transfer into memory. Received data is kept when a connection breaks.

    Args:
        go: the native library
        ticket: the source's first frame of the handshake
        regions: the memory, as flat tensors of bytes
        keep: keeps that memory alive
        checked: whether blocks carry checksums
        what: names the transfer in errors

    Attributes:
        received: bytes that have arrived
    """

    received = 0

    def __init__(
        self, go: Any, ticket: Ticket, regions: Sequence[torch.Tensor], keep: object, checked: bool, what: str
    ) -> None:
        self.session = ticket.session
        self._what = what
        self._landing = Landing(regions, ticket.block_size, what)
        pairs = [(ON_DEVICE if is_staged(region) else region.data_ptr(), region.numel()) for region in regions]
        kept = [keep, self._landing]
        self._fetch = NativeFetch(go, pairs, kept, ticket.block_size, checked, stall=10.0, window=self._landing.window)
        self._landing.begin(self._fetch)

    def run(
        self, address: str, secret: str, deadline: Deadline, progress: TransferProgress, abandon: Abandon
    ) -> Status:
        """Fetches from a source until everything has arrived.

        Raises:
            SourceFailed: the source failed
            CheckpointError: the received data is wrong
            TimeoutError: the deadline has passed
        """
        self._fetch.add(address, secret)
        most = self.received  # blocks that are damaged are not counted any more
        while True:
            left = deadline.left
            if left <= 0:
                raise TimeoutError("timed out")
            abandon.check(self._what)
            status = self._fetch.wait(min(_SLICE, left))
            self._landing.take(self._fetch, status.full)
            if status.received > most:
                most = status.received
                deadline.arrived()
            self.received = status.received
            progress.update(status.received, status.total)
            if status.failure:
                raise CheckpointError(f"{self._what}: {status.failure}")
            if status.done:
                return status
            if not status.running:
                raise SourceFailed(f"{self._what}: {'; '.join(dict.fromkeys(status.failed))}")

    def close(self) -> None:
        """Ends the transfer. After this call nothing writes to the memory."""
        self._fetch.end()
        self._landing.close()


class StateTransfer(Transfer):
    """The transfer of one state.

    Args:
        go, ticket, checked, what: as in :class:`Transfer`
        structure: the source's second frame of the handshake
        own: the local state, to be filled in place; its structure must equal that of the received one
        target: chooses the devices of tensors if there is no ``own``, and has the regions with names
    """

    def __init__(
        self,
        go: Any,
        ticket: Ticket,
        structure: Structure,
        own: Optional[object],
        target: Optional[TargetState],
        checked: bool,
        what: str,
    ) -> None:
        self._tree = structure.tree
        self._sizes = structure.sizes
        mine: Dict[Path, torch.Tensor] = {}
        if own is not None:
            mine = tensors_by_path(own)
        elif target is not None and target.writable:
            mine = target.own()
        self._room: Optional[Reservation] = None
        devices = _devices(structure)
        self._places = Places(structure.tree, structure.sizes, mine, what, _can_fill, strict=own is not None)
        if target is not None and own is None and not target.writable:
            target.devices = devices
            away = sum(structure.sizes[i] for i in structure.devices if i < len(structure.sizes))
            self._room = reserve_for_state(away, what)
        # With a target whose tensors must not be written, `mine` is empty, and `Homes` chooses host memory for all.
        home = partial(_same_kind, what) if own is None and target is None else Homes(mine, devices).of
        memory = HostMemory()
        self._flats = [
            flat_storage(0 if self._places.has(i) else size, what, self._home(i, structure, home), memory)
            for i, size in enumerate(structure.sizes)
        ]
        regions = [self._places.region(i) if self._places.has(i) else flat for i, flat in enumerate(self._flats)]
        self._add_named(structure, target, what)
        super().__init__(go, ticket, regions, [self._flats, self._places], checked, what)

    def _add_named(self, structure: Structure, target: Optional[TargetState], what: str) -> None:
        """Takes the regions that are not received, because the target has them."""
        for region, name in structure.named.items():
            try:
                if target is None or target.has is None or structure.sizes[region] != 0:
                    raise KeyError("it was not to be left out")
                self._flats[region] = storage_bytes(target.has(*name))
            except LookupError as error:
                raise CheckpointError(f"{what}: its region {region} is left out: {error!r}") from error

    def _home(self, region: int, structure: Structure, home: Callable[[str], torch.device]) -> torch.device:
        """The device for a region that is not received into a local tensor."""
        staged = self._places.has(region) or region in self._places.copied
        return CPU if staged else home(structure.devices.get(region, "cpu"))

    def help(self, address: str, secret: str, sizes: List[int]) -> bool:
        """Adds an additional source. Returns False if its state has another layout."""
        if sizes != self._sizes:
            return False
        self._fetch.add(address, secret, Role.ADDITIONAL)
        return True

    def state(self) -> Any:
        """Returns the state, once everything has arrived."""
        self.close()
        return decode(self._tree, self._flats, self._what, self._places.fill(self._flats))

    def close(self) -> None:
        super().close()
        if self._room is not None:
            self._room.release()


def _can_fill(device: torch.device) -> bool:
    return device.type == "cpu" or copies_for(device.type) is not None


def _devices(structure: Structure) -> Dict[Path, str]:
    """The source's devices for the tensors that it has on devices."""
    devices: Dict[Path, str] = {}
    for path, node in tensor_nodes(structure.tree, ()) if structure.devices else ():
        region = (node[1] if node[0] == "D" else node)[1]
        if type(region) is int and region in structure.devices:
            devices[path] = structure.devices[region]
    return devices


def _same_kind(what: str, device: str) -> torch.device:
    """The device for a tensor that is received without a target: this process's current device of the same type."""
    if device == "cpu":
        return CPU
    kind = device.partition(":")[0]
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != kind:
        raise CheckpointError(f"{what}: the source has tensors on {device}, this process has no device of that kind")
    return torch.device(kind, torch.accelerator.current_device_index())
