"""Chooses the existing tensors that a checkpoint is received into."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set

import torch

from torchft.checkpointing.codec.encoding import (
    Encoded,
    Path,
    Replace,
    decode,
    dtype_name,
    dtype_of,
    is_dtensor,
    show_path,
    tensor_at,
)
from torchft.checkpointing.codec.layout import local_part, same_memory, tensor_nodes, tensors_by_path
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.transport import CheckpointError


class Places:
    """Compares the structure announced by a source with the local state, and finds memory for each region.

    A local tensor under the same path is filled: directly by the network if it has a separate region with the same
    memory layout, else by a copy afterwards. Other tensors are allocated.

    Attributes:
        copied: regions of which parts are copied to local tensors

    Args:
        tree: the structure that the source announces
        sizes: sizes of its regions in bytes
        own: the local tensors by path
        what: name of the transfer in errors
        fills: whether tensors on a device can be filled by the network
        strict: whether a state that differs is refused; otherwise only equal tensors are filled

    Raises:
        CheckpointError: with ``strict``, a tensor is announced with another shape or dtype than the local one, or a
            local tensor is not announced; the message names the first such tensor
    """

    def __init__(
        self,
        tree: Any,
        sizes: List[int],
        own: Mapping[Path, torch.Tensor],
        what: str,
        fills: Callable[[torch.device], bool],
        strict: bool = True,
    ) -> None:
        self._fills = fills
        self._regions: Dict[int, torch.Tensor] = {}
        self.copied: Set[int] = set()
        announced = dict(tensor_nodes(tree, ())) if own else {}
        differ = {path: how for path, tensor in own.items() if (how := _difference(tensor, path, announced.get(path)))}
        if strict and differ:
            raise CheckpointError(f"{what}: {next(iter(differ.values()))}")
        self._own = {path: tensor for path, tensor in own.items() if path not in differ}
        if self._own:
            self._place(announced, sizes, Counter(_uses(tree)))

    def _place(self, announced: Dict[Path, List[Any]], sizes: List[int], uses: Dict[int, int]) -> None:
        taken: Set[int] = set()
        for path, tensor in self._own.items():
            node = announced[path]
            _, region, dtype, offset, _, strides, _ = node[1] if node[0] == "D" else node
            local = local_part(tensor)
            self.copied.add(region)
            alone = uses[region] == 1 and offset == 0 and sizes[region] == local.numel() * dtype_of(dtype).itemsize
            if not alone or local.numel() == 0 or not self._fills(local.device) or not _same_strides(local, strides):
                continue
            if _is_dense(local) and local.untyped_storage()._cdata not in taken:
                taken.add(local.untyped_storage()._cdata)
                self._regions[region] = local
                self.copied.remove(region)

    def has(self, region: int) -> bool:
        """Whether a region is received into existing memory."""
        return region in self._regions

    def region(self, region: int) -> torch.Tensor:
        """The memory as a flat tensor of bytes."""
        tensor = self._regions[region]
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        nbytes, start = tensor.numel() * tensor.element_size(), tensor.storage_offset() * tensor.element_size()
        return flat.set_(tensor.untyped_storage(), start, (nbytes,), (1,))

    def fill(self, flats: List[torch.Tensor]) -> Replace:
        """The callback for `decode`: returns the local tensor for a tensor of the structure, filled."""

        def replace(path: Path, node: List[Any]) -> Optional[torch.Tensor]:
            tensor = self._own.get(path)
            if tensor is None:
                return None
            plain = node[1] if node[0] == "D" else node
            arrived = None if self.has(plain[1]) else tensor_at(flats[plain[1]], plain)
            if arrived is not None and not same_memory(tensor, arrived):
                with torch.no_grad():
                    local_part(tensor).copy_(arrived)
            return tensor

        return replace


def moved_into(own: object, state: object, what: str) -> Any:
    """Copies a state that was received into other memory to the local tensors. Returns it with those tensors.

    Raises:
        CheckpointError: raised by `Places`; no tensor has changed then
    """
    encoded = Encoded(state)
    tree = json.loads(encoded.structure)
    flats = [storage_bytes(storage) for storage in encoded.storages]
    places = Places(tree, [flat.numel() for flat in flats], tensors_by_path(own), what, fills=lambda device: False)
    return decode(tree, flats, what, places.fill(flats), trusted=True)


def _difference(tensor: torch.Tensor, path: Path, node: Optional[List[Any]]) -> Optional[str]:
    """The reason why a local tensor cannot be filled with the announced one."""
    if node is None:
        return f"it has no tensor {show_path(path)}, and the state of this group has; do all groups run the same model?"
    if (node[0] == "D") != is_dtensor(tensor):
        return f"{show_path(path)} is a DTensor on one side only"
    local = local_part(tensor)
    plain = node[1] if node[0] == "D" else node
    theirs, mine = (plain[2], plain[4]), (dtype_name(local.dtype), list(local.shape))
    return f"{show_path(path)} is {_show(*theirs)} there and {_show(*mine)} in this group" if theirs != mine else None


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


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory without gaps or overlaps."""
    order = sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), tensor.size(i)))
    expected = 1
    for i in order:
        if tensor.size(i) != 1:
            if tensor.stride(i) != expected:
                return False
            expected *= tensor.size(i)
    return True


def _show(dtype: str, shape: List[int]) -> str:
    return f"{dtype} {list(shape)}"
