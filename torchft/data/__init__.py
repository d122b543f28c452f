"""Data loading: divides the samples of a job among the ranks of its groups.

- ``loader``: :class:`ElasticDataLoader`: each sample counts once per epoch, in batches that do not depend on
  the groups
- ``sampler``: :class:`DistributedSampler`, a fixed part for each rank of each group
- ``position``: the samples of each step, and the part of each rank in them
- ``streams``: the same for a dataset without indices
- ``workers``: worker processes that survive the SIGTERM that drains their group
- ``agreement``: whether the groups of a quorum are at the same position
- ``kept``: the units whose gradients groups keep of a step that was not committed
- ``permutation``: the order of an epoch
- ``cut``: how many units of a batch each group computes
- ``local_steps``: the samples of LocalSGD's and DiLoCo's inner steps
- ``exact_sum``: sums of gradients that depend neither on their order nor on the ranks that compute them

``position``, ``streams``, ``agreement``, ``kept``, ``permutation``, ``cut`` and ``local_steps`` are pure and
free of torch, so names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchft._lazy import resolver

if TYPE_CHECKING:
    from torchft.data.loader import ElasticDataLoader as ElasticDataLoader
    from torchft.data.sampler import DistributedSampler as DistributedSampler

__all__ = ["DistributedSampler", "ElasticDataLoader"]

_EXPORTS = {
    "DistributedSampler": "sampler.DistributedSampler",
    "ElasticDataLoader": "loader.ElasticDataLoader",
}

__getattr__ = resolver(__name__, _EXPORTS)
