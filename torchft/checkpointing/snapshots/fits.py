"""Whether a saved state fits the one that a rank has, decided before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Dict, Optional

from torchft.checkpointing.client.places import difference
from torchft.checkpointing.codec.encoding import Path, show_path
from torchft.checkpointing.codec.layout import tensor_nodes, tensors_by_path


def misfit(tree: Any, own: object) -> Optional[str]:
    """Returns why a saved state cannot be loaded by a rank: the first tensor that differs; None: it fits.

    A saved tensor that the rank lacks is allowed only below an empty container, since a new optimizer has no
    state, and in place of another value.

    Args:
        tree: the structure of the saved state, decoded from JSON.
        own: the state that the rank has.
    """
    saved, mine = tensor_nodes(tree), tensors_by_path(own)
    for path, tensor in mine.items():
        if (differs := difference(tensor, path, saved.get(path))) is not None:
            return differs
    sizes = dict(_sizes(own, ()))
    for path in saved:
        for end in range(1, len(path) + 1):
            if path[:end] not in sizes:
                if sizes[path[: end - 1]]:
                    return f"it has {show_path(path[:end])}, and the state of this group has not"
                break
    return None


def _sizes(value: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Yields the path of each value, and its number of items: 0 for a value without."""
    items: Dict[Any, Any] = {}
    if isinstance(value, Mapping):
        items = dict(value)
    elif isinstance(value, (list, tuple)):
        items = dict(enumerate(value))
    yield path, len(items)
    for key, item in items.items():
        yield from _sizes(item, (*path, f"[{key!r}]"))
