"""DLRover's interfaces for elastic training, implemented with torchft.

``dataset``: :class:`ElasticDataset` and :class:`DataShardService`, which read in the order of
ElasticDataLoader ``optimizer``: :class:`DistributedOptimizer`, a fixed global batch with any number of
workers ``rendezvous``: torchrun's rendezvous through the lighthouse: :class:`TorchRendezvousService`,
:class:`DlroverRendezvousBackend`, and the handler of ``torchrun --rdzv-backend torchft``

Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchft._lazy import resolver

if TYPE_CHECKING:
    from torchft.dlrover.dataset import DataShardService as DataShardService
    from torchft.dlrover.dataset import ElasticDataset as ElasticDataset
    from torchft.dlrover.optimizer import DistributedOptimizer as DistributedOptimizer
    from torchft.dlrover.rendezvous import DlroverRendezvousBackend as DlroverRendezvousBackend
    from torchft.dlrover.rendezvous import LighthouseRendezvousHandler as LighthouseRendezvousHandler
    from torchft.dlrover.rendezvous import TorchRendezvousService as TorchRendezvousService

_EXPORTS = {
    "DataShardService": "dataset.DataShardService",
    "DistributedOptimizer": "optimizer.DistributedOptimizer",
    "DlroverRendezvousBackend": "rendezvous.DlroverRendezvousBackend",
    "ElasticDataset": "dataset.ElasticDataset",
    "LighthouseRendezvousHandler": "rendezvous.LighthouseRendezvousHandler",
    "TorchRendezvousService": "rendezvous.TorchRendezvousService",
}

__all__ = list(_EXPORTS)

__getattr__ = resolver(__name__, _EXPORTS)
