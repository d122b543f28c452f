"""A dataset whose next sample depends on the participating groups, as ElasticDataLoader's position does."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Optional

from torch.utils.data import Dataset, get_worker_info

from torchft.data.loader import ElasticDataLoader, Unit

if TYPE_CHECKING:
    from torchft.manager import Manager


class DataShardService:
    """Returns the indices of this rank's samples one by one, in the process of the Manager.

    Args:
        manager: the Manager of this rank.
        num_samples: number of samples in the dataset.
        settings: settings of :class:`torchft.data.ElasticDataLoader`: ``global_batch_size``,
            ``micro_batch_size``, ``epochs``, …

    Attributes:
        loader: keeps the position in the data; it takes part in heals, and its ``state_dict`` saves the
            position.
        unit: the micro-batch of the last index: its loss is multiplied by ``unit.weight``.
    """

    def __init__(self, manager: Manager, num_samples: int, **settings: Any) -> None:
        self.loader = ElasticDataLoader(manager, range(num_samples), **settings)
        self.unit: Optional[Unit] = None
        self._steps = iter(self.loader)
        self._units: Iterator[Unit] = iter(())  # the rest of the step
        self._left: Iterator[int] = iter(())

    def fetch_record_index(self) -> int:
        """Returns the next index. The first index of a step begins the step, so call it after the
        optimizer has stepped.

        Raises:
            StopIteration: the job is at its end, in all groups at once.
            RuntimeError: in a worker process of a DataLoader.
        """
        if get_worker_info() is not None:
            raise RuntimeError(
                "fetch_record_index was called in a worker process of a DataLoader, which has no Manager: "
                "use "
                "ElasticDataLoader(manager, dataset, num_workers=...), which sends its workers the indices"
            )
        while True:
            for index in self._left:
                return index
            self._begin_unit()

    def __iter__(self) -> Iterator[list[int]]:
        """Yields a list of the length of each micro-batch: the ``batch_sampler`` of a DataLoader without
        workers.

        The content of the list does not matter, because the dataset gets its indices from the service.
        """
        while True:
            try:
                yield list(range(self._begin_unit()))
            except StopIteration:
                return

    def _begin_unit(self) -> int:
        """Begins the next unit. Returns the number of its samples."""
        while (unit := next(self._units, None)) is None:
            self._units = iter(next(self._steps))
        self.unit = unit
        self._left = iter(unit.indices)
        return len(unit.indices)


class ElasticDataset(Dataset, ABC):
    """A map-style dataset for jobs whose groups may join and fail at any time. Subclasses read samples.

    With worker processes, give it to :class:`torchft.data.ElasticDataLoader`, without a service: the loader
    sends its workers the indices. With a service it is for a DataLoader without workers,
    ``batch_sampler=service``.

    With a service, do not set ``shuffle=True`` in a DataLoader: the service shuffles already, and PyTorch
    would first create a permutation of ``len(dataset)`` numbers, for which no memory suffices.

    Args:
        data_shard_service: decides which samples are read; None: the caller's index does.
    """

    def __init__(self, data_shard_service: Optional[DataShardService] = None) -> None:
        self.data_shard_service = data_shard_service

    @abstractmethod
    def read_sample(self, index: int) -> Any:
        """Returns the sample with this index. It may run in a worker process, so it must not call torchft."""

    @abstractmethod
    def num_samples(self) -> int:
        """The real number of samples."""

    def __len__(self) -> int:
        """The real number of samples; with a service, which ends by itself, ``sys.maxsize``."""
        return self.num_samples() if self.data_shard_service is None else sys.maxsize

    def __getitem__(self, index: int) -> Any:
        """Returns the sample with this index; with a service, that of the service's next index."""
        if self.data_shard_service is not None:
            index = self.data_shard_service.fetch_record_index()
        return self.read_sample(index)
