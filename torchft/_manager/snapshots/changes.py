"""Tensors of a state that change while it is copied: a model may write to its own tensors in the forward pass
(a queue of keys, a codebook, weights that follow others), and then a copy would hold two states.

Each tensor counts the operations that write to it. What is written through ``.data`` is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchft.checkpointing.codec.encoding import show_path
from torchft.checkpointing.codec.layout import local_part, tensors_by_path


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
        for path, tensor in tensors_by_path(state).items():
            local = local_part(tensor)  # counts with the tensor
            if not local.is_inference():  # those cannot change
                self._seen.append((show_path(path), local, local._version))

    def changed(self) -> list[Changed]:
        """The tensors that were written to since; an operation on another thread counts when it ends."""
        return [
            Changed(name, tensor.data_ptr(), tensor.nbytes)
            for name, tensor, version in self._seen
            if tensor._version != version
        ]
