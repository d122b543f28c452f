"""The inputs of a step's collectives, kept so that a failed step can be replayed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

import torch

from torchft.work import AnyReduceOp


@dataclass
class Kept:
    """A copy of one tensor that is reduced in place, made before the reduction."""

    tensor: torch.Tensor
    copy: torch.Tensor
    reduce_op: AnyReduceOp
    should_quantize: bool
    version: Optional[int] = None

    def settle(self) -> None:
        """Notes the tensor's version after the reduction: a different one later means a changed result."""
        self.version = _version(self.tensor)


class Inputs:
    """Copies of the inputs of one step's allreduces, in order.

    The copies are made on the caller's current stream, before the collective begins.

    Args:
        copies: buffers that are reused in each step; together they grow to the size of all tensors that a
            step reduces.

    Attributes:
        refused: the action of this rank that rules out a replay of the step; None if there was none.
        before: number of copies that hold the inputs of an earlier attempt, which :meth:`add` adds.
        added: number of those that were added.
    """

    def __init__(self, copies: list[torch.Tensor]) -> None:
        self.refused: Optional[str] = None
        self.before = 0
        self.added = 0
        self._kept: list[Kept] = []
        self._copies = copies

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """Forgets the inputs when the step has ended; the buffers are kept."""
        self.refused = None
        self._kept = []

    def refuse(self, reason: str) -> None:
        """Declares that the step cannot be replayed. The first reason is kept."""
        if self.refused is None:
            self.refused = reason

    def keep(
        self, tensor: torch.Tensor, reduce_op: AnyReduceOp, should_quantize: bool = False
    ) -> Optional[Kept]:
        """Copies a tensor that is about to be reduced. Returns None if the step cannot be replayed anyway."""
        if self.refused is not None:
            return None
        if tensor.layout != torch.strided:
            self.refuse(f"a tensor with layout {tensor.layout} was reduced")
            return None
        kept = Kept(tensor, self._copy(len(self._kept), tensor), reduce_op, should_quantize)
        self._kept.append(kept)
        return kept

    def add(self, tensor: torch.Tensor) -> None:
        """Adds the copy of an earlier attempt to the tensor that is about to be reduced in its place.
        ValueError: it was a tensor of another shape, dtype or device, or there was none.
        """
        copy = self._copies[self.added] if self.added < self.before else None
        if copy is None or _kind(copy) != _kind(tensor):
            there = "no other tensor" if copy is None else f"one with {_kind(copy)}"
            raise ValueError(
                f"tensor {self.added} of this attempt has {_kind(tensor)}, and the attempt before reduced "
                f"{there} in its place: the step is computed again as a whole"
            )
        with torch.no_grad():
            tensor.add_(copy)
        self.added += 1

    def _copy(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if index < len(self._copies):
                copy = self._copies[index]
                if _kind(copy) == _kind(tensor):
                    return copy.copy_(tensor)
                self._copies[index] = tensor.clone()
            else:
                self._copies.append(tensor.clone())
        return self._copies[index]

    def restore(self) -> list[Kept]:
        """Copies all inputs back into their tensors, and returns them in the order of the reductions."""
        with torch.no_grad():
            for kept in self._kept:
                kept.tensor.copy_(kept.copy)
        return self._kept

    def settle(self) -> None:
        """Notes the versions of the results, once all reductions of the step have ended."""
        for kept in self._kept:
            kept.settle()

    def changed(self) -> Optional[str]:
        """A change of the results that a replay would lose, such as gradient clipping; None: no change."""
        for kept in self._kept:
            if kept.version != _version(kept.tensor):
                return (
                    f"a tensor of shape {tuple(kept.tensor.shape)} was changed after it was reduced; what "
                    "changes it (clipping, unscaling) belongs into Manager.register_replay_hook too"
                )
        return None

    def twice(self) -> Optional[str]:
        """Returns a reason if some memory was reduced twice, else None. The input of the second reduction is
        then a result of the first, which other groups took part in: it cannot be reduced again with other
        groups.
        """
        ends: dict[torch.device, list[tuple[int, int]]] = {}
        for kept in self._kept:
            ends.setdefault(kept.tensor.device, []).append(_extent(kept.tensor))
        for spans in ends.values():
            spans.sort()
            for (_, end), (start, _) in itertools.pairwise(spans):
                if start < end:
                    return "the same memory was reduced twice"
        return None

    def elsewhere(self, gradients: Iterable[torch.Tensor]) -> Optional[str]:
        """Names a gradient outside the memory that was reduced, such as a copy; None: there is none."""
        reduced = {kept.tensor.untyped_storage().data_ptr() for kept in self._kept}
        for gradient in gradients:
            if gradient.untyped_storage().data_ptr() not in reduced:
                return (
                    f"a gradient of shape {tuple(gradient.shape)} is not in the memory that was reduced; "
                    "what copies it there belongs into Manager.register_replay_hook too"
                )
        return None


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses at which a tensor begins and ends, including gaps between its elements."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()
