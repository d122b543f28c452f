"""Chooses the existing tensors that a checkpoint is received into."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing._encoding import (
    Encoded,
    Path,
    Replace,
    decode,
    dtype_name,
    dtype_of,
    is_dtensor,
    is_plain,
    show_path,
    storage_bytes,
    tensor_at,
)
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


def tensors_by_path(state: object) -> Dict[Path, torch.Tensor]:
    """The plain and distributed tensors of a state, by path."""
    return {
        tuple(str(key) for key in path): leaf
        for path, leaf in pytree.tree_flatten_with_path(state)[0]
        if isinstance(leaf, torch.Tensor) and (is_plain(leaf) or is_dtensor(leaf))
    }


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


def tensor_nodes(node: Any, path: Path) -> Iterator[Tuple[Path, List[Any]]]:
    """The tensors of a structure, in the order of `decode`. For a malformed structure this raises
    nothing: `decode` does.
    """
    if not isinstance(node, list) or not node:
        return
    tag, *items = node
    if tag in ("T", "D"):
        plain = node[1] if tag == "D" and len(node) > 1 else node
        if isinstance(plain, list) and len(plain) == 7 and plain[0] == "T":
            yield path, node
    elif tag in ("l", "t", "s"):
        for i, item in enumerate(items):
            yield from tensor_nodes(item, (*path, f"[{i}]"))
    elif tag in ("d", "o"):
        for key, item in zip(items[::2], items[1::2]):
            yield from tensor_nodes(key, path)
            yield from tensor_nodes(item, (*path, f"[{_show_key(key)}]"))


def _show_key(key: Any) -> str:
    """Formats a key as `decode` does in a path; a key that `decode` rejects gets a name that no tensor has."""
    if not isinstance(key, list):
        return repr(key)
    try:
        return repr(decode(key, [], "a key"))
    except CheckpointError:
        return json.dumps(key)


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


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor.detach() if is_dtensor(tensor) else tensor.detach()  # type: ignore[attr-defined]


def same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, or their local shards, begin at the same address."""
    return local_part(tensor).data_ptr() == local_part(other).data_ptr()


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
