"""DLRover's interfaces for elastic training, over torchft's parts.

``dataset``: :class:`ElasticDataset` and :class:`DataShardService`, over the position of ElasticDataLoader
``optimizer``: :class:`DistributedOptimizer`, a batch of the same size with any number of workers

Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchft._lazy import resolver

if TYPE_CHECKING:
    from torchft.dlrover.dataset import DataShardService as DataShardService
    from torchft.dlrover.dataset import ElasticDataset as ElasticDataset
    from torchft.dlrover.optimizer import DistributedOptimizer as DistributedOptimizer

_EXPORTS = {
    "DataShardService": "dataset.DataShardService",
    "DistributedOptimizer": "optimizer.DistributedOptimizer",
    "ElasticDataset": "dataset.ElasticDataset",
}

__all__ = ["DataShardService", "DistributedOptimizer", "ElasticDataset"]

__getattr__ = resolver(__name__, _EXPORTS)
