"""Which rank reads which part of the data.

``sampler``: :class:`DistributedSampler`, a fixed part for each rank of each group
``position``: the samples of each step, and the part of each rank in them
``agreement``: whether the groups of a quorum are at the same position
``permutation``: the order of an epoch
``exact_sum``: sums of gradients that depend neither on their order nor on who computes them

All but ``sampler`` and ``exact_sum`` is pure and free of torch, so names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchft.data.sampler import DistributedSampler as DistributedSampler

__all__ = ["DistributedSampler"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'torchft.data' has no attribute {name!r}")
    value = getattr(importlib.import_module("torchft.data.sampler"), name)
    globals()[name] = value
    return value
