"""The tensors of a state and of its structure, by path."""

from __future__ import annotations

import json
from typing import Any, Dict, Iterator, List, Tuple

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.codec.encoding import Path, decode, is_dtensor, is_plain
from torchft.checkpointing.transport import CheckpointError


def tensors_by_path(state: object) -> Dict[Path, torch.Tensor]:
    """The plain and distributed tensors of a state, by path."""
    return {
        tuple(str(key) for key in path): leaf
        for path, leaf in pytree.tree_flatten_with_path(state)[0]
        if isinstance(leaf, torch.Tensor) and (is_plain(leaf) or is_dtensor(leaf))
    }


def leaves(node: Any, path: Path = ()) -> Iterator[Tuple[Path, List[Any]]]:
    """The tensors, arrays and other items of a structure, in the order of `decode`, which alone raises if it
    is malformed.
    """
    if not isinstance(node, list) or not node:
        return
    tag, *items = node
    if tag in ("l", "t", "s"):
        for i, item in enumerate(items):
            yield from leaves(item, (*path, f"[{i}]"))
    elif tag in ("d", "o"):
        for key, item in zip(items[::2], items[1::2]):
            yield from leaves(key, path)
            yield from leaves(item, (*path, f"[{_show_key(key)}]"))
    else:
        yield path, node


def tensor_nodes(tree: Any) -> Dict[Path, List[Any]]:
    """The tensors of a structure, by path."""
    return {path: node for path, node in leaves(tree) if _is_tensor(node)}


def _is_tensor(node: List[Any]) -> bool:
    plain = plain_node(node) if node[0] in ("T", "D") and len(node) > 1 else None
    return isinstance(plain, list) and len(plain) == 7 and plain[0] == "T" and type(plain[1]) is int


def regions_of(node: Any) -> List[int]:
    """The regions that a leaf uses."""
    if not isinstance(node, list) or len(node) < 3:
        return []
    if node[0] == "D":
        return [*regions_of(node[1]), *regions_of(node[2])]
    used = [node[1]] if node[0] == "T" else node[2] if node[0] == "P" else []
    return [region for region in used if type(region) is int] if isinstance(used, list) else []


def plain_node(node: List[Any]) -> List[Any]:
    """The description of a tensor, or of the local shard of a DTensor."""
    return node[1] if node[0] == "D" else node


def _show_key(key: Any) -> str:
    """Formats a key as `decode` does in a path; one that `decode` rejects gets a name of no tensor."""
    if not isinstance(key, list):
        return repr(key)
    try:
        return repr(decode(key, [], "a key"))
    except CheckpointError:
        return json.dumps(key)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    return tensor._local_tensor.detach() if is_dtensor(tensor) else tensor.detach()  # type: ignore[attr-defined]


def same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, or their local shards, begin at the same address."""
    return local_part(tensor).data_ptr() == local_part(other).data_ptr()
