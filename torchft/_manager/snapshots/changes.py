"""Tensors of a state that change while it is copied: a model may write to its own tensors in the forward pass
(a queue of keys, a codebook, weights that follow others), and then a copy would hold two states.

Each tensor counts the operations that write to it. What is written through ``.data`` is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.codec.encoding import is_dtensor, is_plain


class Changed(NamedTuple):
    """A tensor that has changed.

    Attributes:
        name: its path in the state.
        address: of its memory.
        nbytes: its size.
    """

    name: str
    address: int
    nbytes: int


class Versions:
    """The tensors of a state as they are now."""

    def __init__(self, state: object) -> None:
        self._seen: list[tuple[str, torch.Tensor, int]] = []
        for path, leaf in pytree.tree_leaves_with_path(state):
            if isinstance(leaf, torch.Tensor) and (is_dtensor(leaf) or is_plain(leaf)):
                tensor = leaf._local_tensor if is_dtensor(leaf) else leaf  # type: ignore[attr-defined]
                if not tensor.is_inference():  # those cannot change
                    self._seen.append((pytree.keystr(path), tensor, tensor._version))

    def changed(self) -> list[Changed]:
        """Returns the tensors that were written to since. An operation that is in progress on another thread
        counts when it ends.
        """
        return [
            Changed(name, tensor.data_ptr(), tensor.nbytes)
            for name, tensor, version in self._seen
            if tensor._version != version
        ]
