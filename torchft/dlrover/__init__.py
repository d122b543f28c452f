"""DLRover's interfaces for elastic training, over torchft's parts.

``dataset``: :class:`ElasticDataset` and :class:`DataShardService`, over the position of ElasticDataLoader
``optimizer``: :class:`DistributedOptimizer`, a batch of the same size with any number of workers

Names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchft.dlrover.dataset import DataShardService as DataShardService
    from torchft.dlrover.dataset import ElasticDataset as ElasticDataset
    from torchft.dlrover.optimizer import DistributedOptimizer as DistributedOptimizer

_MODULES = {"DataShardService": "dataset", "DistributedOptimizer": "optimizer", "ElasticDataset": "dataset"}

__all__ = ["DataShardService", "DistributedOptimizer", "ElasticDataset"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'torchft.dlrover' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"torchft.dlrover.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
