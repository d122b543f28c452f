"""ElasticDataset: its length, and the processes that may request an index."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import DataLoader

from torchft.dlrover import ElasticDataset
from torchft.dlrover.dataset import DataShardService


class Squares(ElasticDataset):
    def read_sample(self, index: int) -> int:
        return index * index

    def num_samples(self) -> int:
        return 5


class Step:
    """A step like ElasticDataLoader's: an iterable of units."""

    def __init__(self, *units: list[int]) -> None:
        self._units = units

    def __iter__(self) -> Iterator[Any]:
        for unit in self._units:
            yield mock.Mock(indices=unit)


@pytest.fixture
def service() -> Iterator[DataShardService]:
    with mock.patch("torchft.dlrover.dataset.ElasticDataLoader") as loader:
        loader.return_value.__iter__.return_value = iter([Step([3, 1], [4]), Step([0, 2])])
        yield DataShardService(mock.Mock(), 5, global_batch_size=3, micro_batch_size=2)


def test_without_a_service_it_is_an_ordinary_dataset() -> None:
    dataset = Squares()
    assert len(dataset) == 5 and dataset[3] == 9
    assert [batch.tolist() for batch in DataLoader(dataset, batch_size=2)] == [[0, 1], [4, 9], [16]]


def test_with_a_service_the_service_chooses_the_samples(service: DataShardService) -> None:
    dataset = Squares(service)
    assert len(dataset) == sys.maxsize
    assert [dataset[0] for _ in range(5)] == [9, 1, 16, 0, 4]
    with pytest.raises(StopIteration):
        service.fetch_record_index()


def test_batches_are_the_micro_batches_of_the_loader(service: DataShardService) -> None:
    seen = []
    for batch in DataLoader(Squares(service), batch_sampler=service):
        assert service.unit is not None
        seen.append((batch.tolist(), list(service.unit.indices)))
    assert seen == [([9, 1], [3, 1]), ([16], [4]), ([0, 4], [0, 2])]


def test_a_worker_process_is_refused_with_a_remedy(service: DataShardService) -> None:
    with pytest.raises(
        RuntimeError, match=r"worker process of a DataLoader.*ElasticDataLoader\(manager, dataset"
    ):
        next(iter(DataLoader(Squares(service), batch_size=2, num_workers=1)))


def test_after_an_error_the_service_continues() -> None:
    """A loop that retries, as after a timeout of the quorum, must not take the error for the end of the
    job.
    """

    def begin() -> Step:
        raised.append(TimeoutError("no quorum"))
        if len(raised) == 1:
            raise raised[0]
        return Step([3, 1])

    raised: list[Exception] = []
    with mock.patch("torchft.dlrover.dataset.ElasticDataLoader") as loader:
        loader.return_value.__iter__.return_value = iter(begin, None)
        service = DataShardService(mock.Mock(), 5, global_batch_size=3, micro_batch_size=2)
    with pytest.raises(TimeoutError):
        service.fetch_record_index()
    assert [service.fetch_record_index() for _ in range(2)] == [3, 1]
