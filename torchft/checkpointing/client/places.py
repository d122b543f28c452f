"""The memory that a state is received into: the tensors that this group has, and new ones."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set

import torch

from torchft.checkpointing.client.target import CPU, BufferMap, TargetState
from torchft.checkpointing.codec.encoding import (
    Encoded,
    Path,
    decode,
    dtype_name,
    is_dtensor,
    show_path,
    tensor_at,
)
from torchft.checkpointing.codec.handshake import Structure
from torchft.checkpointing.codec.layout import local_part, plain_node, same_memory, tensor_nodes
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.memory.host import HostMemory, flat_storage, reserve_for_state
from torchft.checkpointing.memory.reservation import Reservation
from torchft.checkpointing.memory.staging import copies_for
from torchft.checkpointing.transport import CheckpointError


class Destination:
    """The memory for one state.

    Args:
        home: returns the device for a tensor on a device of the source, if there is no target

    Attributes:
        sizes: sizes of the source's regions, in bytes
        regions: the memory to receive these into, as flat tensors of bytes; empty for those that are not sent

    Raises:
        CheckpointError: there is not enough memory, or the state does not fit a strict target
    """

    def __init__(
        self,
        structure: Structure,
        target: Optional[TargetState],
        what: str,
        home: Callable[[str], torch.device],
    ) -> None:
        self.sizes = structure.sizes
        self._tree = structure.tree
        self._what = what
        self._room: Optional[Reservation] = None
        own = target.own() if target is not None and target.writable else {}
        self._places = Places(
            structure.tree, structure.sizes, own, what, target is not None and target.strict
        )
        if target is not None:
            devices = _devices(structure)
            # without local tensors this chooses host memory for all
            home = BufferMap(own, devices).of
            if not target.writable:
                target.devices = devices
                away = sum(structure.sizes[i] for i in structure.devices if i < len(structure.sizes))
                self._room = reserve_for_state(away, what)
        memory = HostMemory()
        in_place = self._places.regions
        self._flats: List[torch.Tensor] = []
        for i, size in enumerate(structure.sizes):
            staged = i in in_place or i in self._places.copied
            device = CPU if staged else home(structure.devices.get(i, "cpu"))
            self._flats.append(flat_storage(0 if i in in_place else size, what, device, memory))
        self.regions = [in_place.get(i, flat) for i, flat in enumerate(self._flats)]
        self._add_named(structure, target)

    def _add_named(self, structure: Structure, target: Optional[TargetState]) -> None:
        """Takes the regions that are not received, because the target has them."""
        for region, name in structure.named.items():
            try:
                if target is None or target.has is None or structure.sizes[region] != 0:
                    raise KeyError("it was not to be left out")
                self._flats[region] = storage_bytes(target.has(*name))
            except LookupError as error:
                raise CheckpointError(f"{self._what}: its region {region} is left out: {error!r}") from error

    def state(self) -> Any:
        """Returns the state, once everything has arrived."""
        return self._places.decode(self._tree, self._flats)

    def close(self) -> None:
        if self._room is not None:
            self._room.release()


class Places:
    """Compares the structure announced by a source with the local state, and finds memory for each region.

    A local tensor under the same path is filled: directly by the transfer if it has a separate region with
    the same memory layout, else by a copy afterwards. Other tensors are allocated.

    Args:
        strict: whether a state that differs is refused; otherwise only equal tensors are filled

    Attributes:
        regions: the local memory, as flat tensors of bytes, that regions are received into
        copied: regions of which parts are copied to local tensors

    Raises:
        CheckpointError: with ``strict``, a tensor is announced with another shape or dtype than the local
            one, or a local tensor is not announced; the message names the first such tensor
    """

    def __init__(
        self, tree: Any, sizes: List[int], own: Mapping[Path, torch.Tensor], what: str, strict: bool
    ) -> None:
        self._what = what
        self.regions: Dict[int, torch.Tensor] = {}
        self.copied: Set[int] = set()
        announced = dict(tensor_nodes(tree, ())) if own else {}
        differ = {
            path: how
            for path, tensor in own.items()
            if (how := difference(tensor, path, announced.get(path)))
        }
        if strict and differ:
            raise CheckpointError(f"{what}: {next(iter(differ.values()))}")
        self._own = {path: tensor for path, tensor in own.items() if path not in differ}
        if self._own:
            self._place(announced, sizes, Counter(_uses(tree)))

    def _place(self, announced: Dict[Path, List[Any]], sizes: List[int], uses: Dict[int, int]) -> None:
        taken: Set[int] = set()
        for path, tensor in self._own.items():
            _, region, _, offset, _, strides, _ = plain_node(announced[path])
            local = local_part(tensor)
            self.copied.add(region)
            if uses[region] != 1 or offset != 0 or local.numel() == 0 or not _can_fill(local.device):
                continue
            storage, start = local.untyped_storage(), local.storage_offset() * local.element_size()
            padded = is_dtensor(tensor) and start == 0  # FSDP2 pads shards to equal sizes
            if sizes[region] not in (local.nbytes, storage.nbytes() if padded else local.nbytes):
                continue
            dense = torch.ops.aten.is_non_overlapping_and_dense(local)
            if _same_strides(local, strides) and dense and storage._cdata not in taken:
                taken.add(storage._cdata)
                flat = torch.empty(0, dtype=torch.uint8, device=local.device)
                self.regions[region] = flat.set_(storage, start, (sizes[region],), (1,))
                self.copied.remove(region)

    def decode(self, tree: Any, flats: List[torch.Tensor], trusted: bool = False) -> Any:
        """Builds the state from the local tensors, which are filled, and regions; see `encoding.decode`."""

        def replace(path: Path, node: List[Any]) -> Optional[torch.Tensor]:
            tensor = self._own.get(path)
            plain = plain_node(node)
            if tensor is None or plain[1] in self.regions:
                return tensor
            arrived = tensor_at(flats[plain[1]], plain)
            if not same_memory(tensor, arrived):
                with torch.no_grad():
                    local_part(tensor).copy_(arrived)
            return tensor

        return decode(tree, flats, self._what, replace, trusted)


def moved_into(own: Mapping[Path, torch.Tensor], state: object, what: str) -> Any:
    """Copies a state that was received into other memory to the local tensors, and returns it with those.
    After a CheckpointError of `Places` no tensor has changed.
    """
    encoded = Encoded(state)
    tree = json.loads(encoded.structure)
    flats = [storage_bytes(storage) for storage in encoded.storages]
    # regions without bytes are received into no local tensor
    return Places(tree, [0] * len(flats), own, what, strict=True).decode(tree, flats, trusted=True)


def device_like(what: str, device: str) -> torch.device:
    """This process's current device of the same type as one of the source; CheckpointError without one."""
    if device == "cpu":
        return CPU
    kind = device.partition(":")[0]
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != kind:
        raise CheckpointError(
            f"{what}: the source has tensors on {device}, this process has no device of that kind"
        )
    return torch.device(kind, torch.accelerator.current_device_index())


def _can_fill(device: torch.device) -> bool:
    return device.type == "cpu" or copies_for(device.type) is not None


def _devices(structure: Structure) -> Dict[Path, str]:
    """The source's devices for the tensors that it has on devices."""
    devices: Dict[Path, str] = {}
    for path, node in tensor_nodes(structure.tree, ()) if structure.devices else ():
        region = plain_node(node)[1]
        if type(region) is int and region in structure.devices:
            devices[path] = structure.devices[region]
    return devices


def difference(tensor: torch.Tensor, path: Path, node: Optional[List[Any]]) -> Optional[str]:
    """The reason why a local tensor cannot be filled with the announced one."""
    if node is None:
        return (
            f"it has no tensor {show_path(path)}, and the state of this group has; "
            "do all groups run the same model?"
        )
    if (node[0] == "D") != is_dtensor(tensor):
        return f"{show_path(path)} is a DTensor on one side only"
    local = local_part(tensor)
    plain = plain_node(node)
    theirs, mine = (plain[2], plain[4]), (dtype_name(local.dtype), list(local.shape))
    if theirs == mine:
        return None
    (dtype, shape), (own_dtype, own_shape) = theirs, mine
    return f"{show_path(path)} is {dtype} {list(shape)} there and {own_dtype} {own_shape} in this group"


def _uses(node: Any) -> Iterator[int]:
    """All tensors of the structure that use a region."""
    if not isinstance(node, list) or not node:
        return
    if node[0] == "T" and len(node) > 1:
        yield node[1]
    elif node[0] == "P" and len(node) > 2 and isinstance(node[2], list):
        yield from node[2]
    elif node[0] == "spec":
        return
    else:
        for item in node[1:]:
            yield from _uses(item)


def _same_strides(tensor: torch.Tensor, strides: List[int]) -> bool:
    """Compares strides, except those of dimensions with one element, which have no effect."""
    return all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), strides))
