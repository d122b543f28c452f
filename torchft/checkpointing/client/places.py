"""The memory that a state is received into: the tensors that this group has, and new ones."""

from __future__ import annotations

from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Set

import torch

from torchft.checkpointing.client.target import CPU, BufferMap, TargetState
from torchft.checkpointing.codec.encoding import Path, decode, dtype_name, is_dtensor, show_path, tensor_at
from torchft.checkpointing.codec.handshake import Structure
from torchft.checkpointing.codec.layout import (
    leaves,
    local_part,
    plain_node,
    regions_of,
    same_memory,
    tensor_nodes,
)
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.memory.host import HostMemory, flat_storage
from torchft.checkpointing.memory.reservation import Reservation, reserve_for_state
from torchft.checkpointing.memory.staging import copies_for
from torchft.checkpointing.transport import CheckpointError


class Destination:
    """The memory for one state.

    A local tensor under the same path, with the same shape and dtype, is filled: directly by the transfer if
    it has a separate region with the same memory layout, else by a copy afterwards. Other tensors are
    allocated.

    Args:
        home: returns the device for a tensor on a device of the source, if there is no target

    Attributes:
        regions: the memory to receive the source's regions into, as flat tensors of bytes; empty for those
            that are not sent

    Raises:
        CheckpointError: there is not enough memory
    """

    def __init__(
        self,
        structure: Structure,
        target: Optional[TargetState],
        what: str,
        home: Callable[[str], torch.device],
    ) -> None:
        self._tree = structure.tree
        self._what = what
        self._room: Optional[Reservation] = None
        known = range(len(structure.regions))
        announced = tensor_nodes(structure.tree) if target is not None else {}
        announced = {path: node for path, node in announced.items() if plain_node(node)[1] in known}
        own = target.own() if target is not None and target.writable else {}
        self._own = {
            path: tensor
            for path, tensor in own.items()
            if difference(tensor, path, announced.get(path)) is None
        }
        self._placed = self._place(announced, structure)
        if target is not None:
            devices = {
                path: region.device
                for path, node in announced.items()
                if (region := structure.regions[plain_node(node)[1]]).device != "cpu"
            }
            # without local tensors this chooses host memory for all
            home = BufferMap(own, devices).of
            if not target.writable:
                target.devices = devices
                away = sum(region.nbytes for region in structure.regions if region.device != "cpu")
                self._room = reserve_for_state(away, what)
        copied = {plain_node(announced[path])[1] for path in self._own}
        memory = HostMemory()
        self._flats: List[torch.Tensor] = []
        for i, region in enumerate(structure.regions):
            flat = self._placed.get(i)
            if flat is None:
                device = CPU if i in copied or region.device == "cpu" else home(region.device)
                flat = flat_storage(region.nbytes, what, device, memory)
            self._flats.append(flat)
        self.regions = list(self._flats)
        self._add_named(structure, target)

    def _place(self, announced: Dict[Path, List[Any]], structure: Structure) -> Dict[int, torch.Tensor]:
        """The memory of local tensors that regions are received into, as flat tensors of bytes."""
        placed: Dict[int, torch.Tensor] = {}
        taken: Set[int] = set()
        uses = Counter(region for _, node in leaves(structure.tree) for region in regions_of(node))
        for path, tensor in self._own.items():
            _, region, _, offset, _, strides, _ = plain_node(announced[path])
            local = local_part(tensor)
            kind = local.device.type
            if uses[region] != 1 or offset != 0 or local.numel() == 0:
                continue
            if kind != "cpu" and copies_for(kind) is None:
                continue
            storage, start = local.untyped_storage(), local.storage_offset() * local.element_size()
            padded = is_dtensor(tensor) and start == 0  # FSDP2 pads shards to equal sizes
            nbytes = structure.regions[region].nbytes
            if nbytes not in (local.nbytes, storage.nbytes() if padded else local.nbytes):
                continue
            dense = torch.ops.aten.is_non_overlapping_and_dense(local)
            if _same_strides(local, strides) and dense and storage._cdata not in taken:
                taken.add(storage._cdata)
                flat = torch.empty(0, dtype=torch.uint8, device=local.device)
                placed[region] = flat.set_(storage, start, (nbytes,), (1,))
        return placed

    def _add_named(self, structure: Structure, target: Optional[TargetState]) -> None:
        """Takes the regions that are not received, because the target has them."""
        for i, region in enumerate(structure.regions):
            if region.name is None:
                continue
            try:
                if target is None or target.has is None or region.nbytes != 0:
                    raise KeyError("it was not to be left out")
                self._flats[i] = storage_bytes(target.has(*region.name))
            except LookupError as error:
                raise CheckpointError(f"{self._what}: its region {i} is left out: {error!r}") from error

    def state(self) -> Any:
        """Returns the state, once everything has arrived: the local tensors, which are filled, and others."""
        return decode(self._tree, self._flats, self._what, self._local)

    def _local(self, path: Path, node: List[Any]) -> Optional[torch.Tensor]:
        tensor, plain = self._own.get(path), plain_node(node)
        if tensor is None or plain[1] in self._placed:
            return tensor
        arrived = tensor_at(self._flats[plain[1]], plain)
        if not same_memory(tensor, arrived):
            with torch.no_grad():
                local_part(tensor).copy_(arrived)
        return tensor

    def close(self) -> None:
        if self._room is not None:
            self._room.release()


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


def _same_strides(tensor: torch.Tensor, strides: List[int]) -> bool:
    """Compares strides, except those of dimensions with one element, which have no effect."""
    return all(size == 1 or a == b for size, a, b in zip(tensor.shape, tensor.stride(), strides))
