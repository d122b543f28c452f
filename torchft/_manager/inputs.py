"""The inputs of a step's collectives, kept so that a failed step can be replayed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Optional

import torch
from torch.distributed import ReduceOp


class Kept:
    """One tensor that is reduced in place, as it was before."""

    __slots__ = ("copy", "reduce_op", "should_quantize", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool) -> None:
        self.tensor = tensor
        self.copy = copy
        self.reduce_op = reduce_op
        self.should_quantize = should_quantize
        self.version: Optional[int] = None

    def settle(self) -> None:
        """The reduction has ended: whoever changes the tensor from now on changes its result."""
        self.version = _version(self.tensor)

    def restore(self) -> None:
        """Puts the tensor back as it was before the reduction."""
        with torch.no_grad():
            self.tensor.copy_(self.copy)


class Inputs:
    """The inputs of one step's allreduces, in their order.

    The copies are made on the stream that calls, before the collective begins.

    Args:
        copies: memory that serves all steps; it grows to as much as all that is reduced in one.

    Attributes:
        refused: why the step cannot be done again, as far as this rank's own doing goes; None if nothing is known.
    """

    def __init__(self, copies: list[torch.Tensor]) -> None:
        self.refused: Optional[str] = None
        self._kept: list[Kept] = []
        self._copies = copies

    def __len__(self) -> int:
        return len(self._kept)

    def forget(self) -> None:
        """The step has ended. The memory stays."""
        self.refused = None
        self._kept = []

    def refuse(self, reason: str) -> None:
        """The step does something that cannot be done again. What came first counts."""
        if self.refused is None:
            self.refused = reason

    def keep(self, tensor: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool = False) -> Optional[Kept]:
        """Copies a tensor that is about to be reduced; None if there is no use in it."""
        if self.refused is not None:
            return None
        if tensor.layout != torch.strided:
            self.refuse(f"a tensor with layout {tensor.layout} was reduced")
            return None
        kept = Kept(tensor, self._copy(len(self._kept), tensor), reduce_op, should_quantize)
        self._kept.append(kept)
        return kept

    def _copy(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if index < len(self._copies):
                copy = self._copies[index]
                if (copy.shape, copy.dtype, copy.device) == (tensor.shape, tensor.dtype, tensor.device):
                    return copy.copy_(tensor)
                self._copies[index] = tensor.clone()
            else:
                self._copies.append(tensor.clone())
        return self._copies[index]

    def restore(self) -> list[Kept]:
        """Puts all tensors back as they were before they were reduced; gives them in their order."""
        for kept in self._kept:
            kept.restore()
        return self._kept

    def settle(self) -> None:
        """All reductions have ended."""
        for kept in self._kept:
            kept.settle()

    def changed(self) -> Optional[str]:
        """What became of the results, if it would be lost in doing the step again: clipping, say."""
        for kept in self._kept:
            if kept.version != _version(kept.tensor):
                return (
                    f"a tensor of shape {tuple(kept.tensor.shape)} was changed after it was reduced; what changes it "
                    "(clipping, unscaling) belongs into Manager.register_replay_hook too"
                )
        return None

    def twice(self) -> Optional[str]:
        """Whether some memory was reduced twice: what it was before the second time is no input of this group alone."""
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
        """Whether the optimizer reads something else than what was reduced in place, such as a copy of it."""
        reduced = {kept.tensor.untyped_storage().data_ptr() for kept in self._kept}
        for gradient in gradients:
            if gradient.untyped_storage().data_ptr() not in reduced:
                return (
                    f"a gradient of shape {tuple(gradient.shape)} is not in the memory that was reduced; what copies "
                    "it there belongs into Manager.register_replay_hook too"
                )
        return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins and ends in memory, in bytes. What lies between its elements counts."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()
