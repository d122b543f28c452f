"""Reading of a stream by worker processes: each of them reads whole sources."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Optional

import pytest
import torch
from torch.utils.data import _utils, get_worker_info

from tests.unit.data.streaming import Files, Sample
from tests.unit.data.test_loader import Alone
from tests.unit.data.test_loader_reading import Changing
from torchft.data import ElasticDataLoader, _lanes
from torchft.data._prefetch import ReadFailed
from torchft.data.position import DataPosition

LENGTHS = [7, 12, 0, 5, 9, 1]
SIZES: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, shuffle=False, collate_fn=list)


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    yield
    assert not multiprocessing.active_children()


class Signed(Files):
    """Each sample comes with the process that has read it."""

    def shard(self, num_shards: int, index: int) -> Files:
        return Signed(**vars(super().shard(num_shards, index)))

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample, os.getpid()


def make(manager: Optional[Alone] = None, data: Any = None, **settings: Any) -> ElasticDataLoader:
    return ElasticDataLoader(manager or Alone(), data or Signed(LENGTHS), **{**SIZES, **settings})


def train(loader: ElasticDataLoader, steps: Optional[int] = None) -> list[list[Any]]:
    """Commits steps, all or this number; returns the samples of each, as one group has read them."""
    manager: Any = loader._manager
    found: list[list[Any]] = []
    while len(found) != steps and (step := next(loader, None)) is not None:
        units = list(step)
        found.append([s for unit in units if unit.weight for s in unit.data[: len(unit.indices)]])
        loader.check_samples(loader.send_samples(), 1)
        manager.decide(True)
    loader._stop_reading()
    return found


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 9])
def test_each_sample_once_an_epoch_whoever_reads_it(workers: int) -> None:
    loader = make(num_workers=workers, epochs=2)
    expected = make().state_dict()
    found = train(loader)
    samples = Counter(sample for step in found for sample, _ in step)
    assert samples == Counter({s: 1 for epoch in range(2) for s in Files(LENGTHS).samples(epoch)})
    readers: dict[tuple[int, int], set[int]] = {(epoch, file): set() for epoch, file, _ in samples}
    for (epoch, file, _), pid in (each for step in found for each in step):
        readers[epoch, file].add(pid)
    assert {len(pids) for pids in readers.values()} == {1}, "two workers have read a source"
    pids = {pid for one in readers.values() for pid in one}
    assert pids == {os.getpid()} if not workers else len(pids) == min(workers, 5)
    assert loader.state_dict() == {**expected, "epoch": 2, "batch": 0, "epochs": 2}


class Hangs:
    """In place of torch.manual_seed, as if another thread had held its lock at the fork of some workers."""

    def __init__(self, times: int) -> None:
        self.left = multiprocessing.get_context("fork").Value("i", times)

    def __call__(self, seed: int) -> None:
        with self.left:
            self.left.value -= 1
            hangs = self.left.value >= 0
        while hangs:
            time.sleep(60)


@pytest.mark.parametrize("data", [Signed(LENGTHS), range(40)], ids=["stream", "indices"])
def test_workers_that_hang_at_their_begin_are_started_again(
    data: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "manual_seed", Hangs(1))
    monkeypatch.setattr(_lanes, "_BEGIN_S", (1.0, 60.0))
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)  # the wait for the end of one that hangs
    expected = train(make(data=data))
    found = train(make(data=data, num_workers=2))
    samples = [[sample if isinstance(sample, int) else sample[0] for sample in step] for step in found]
    assert samples == [[s if isinstance(s, int) else s[0] for s in step] for step in expected]
    assert "worker processes did not begin within 1 s: they are started again" in caplog.text


def test_workers_that_never_begin_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", Hangs(9))
    monkeypatch.setattr(_lanes, "_BEGIN_S", (0.5,))
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    with pytest.raises(ReadFailed, match="WorkersHang: worker processes did not begin in 1 attempts: they"):
        train(make(num_workers=1))


class LikeHuggingFace(Files):
    """Its order depends on the worker that reads it, and a worker reads its own part."""

    def shard(self, num_shards: int, index: int) -> Files:
        return LikeHuggingFace(**vars(super().shard(num_shards, index)))

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        samples = [(sample, 0) for sample in super().__iter__()]
        return iter(samples if info is None else samples[::-1][info.id :: info.num_workers])


@pytest.mark.parametrize("make_data", [Signed, LikeHuggingFace])
def test_another_number_of_workers_goes_on(make_data: Any) -> None:
    """A checkpoint has the position only; the job that loads it has another number of workers."""
    found: list[Sample] = []
    state = None
    for workers, steps in ((2, 2), (0, 1), (3, 3), (1, None)):
        loader = make(data=make_data(LENGTHS), num_workers=workers, epochs=2)
        if state is not None:
            loader.load_state_dict(state)
        found += [sample for step in train(loader, steps) for sample, _ in step]
        state = loader.state_dict()
    assert Counter(found) == Counter({s: 1 for epoch in range(2) for s in Files(LENGTHS).samples(epoch)})


@pytest.mark.parametrize("workers", [0, 2])
def test_changes_of_membership(workers: int) -> None:
    """This rank gets the units of its plan, whatever it had read ahead for another one."""
    manager = Changing()
    loader = make(manager, Files([50] * 6), num_workers=workers)
    plan = loader._plan
    for number, (rank, participants) in enumerate(
        [(0, 1), (0, 2), (0, 2), (1, 2), (2, 3), (None, 1), (None, 1), (0, 1), (3, 5), (0, 2), (0, 1)]
    ):
        manager.rank_now, manager.participants = rank, participants
        step = next(loader)
        units = list(step)
        position = DataPosition(0, number)
        assert [unit.number for unit in step._share.units] == [
            unit.number for unit in plan.share(position, rank, participants).units
        ]
        for unit, planned in zip(units, step._share.units):
            first = 2 * number
            assert unit.data == [(0, planned.number, first), (0, planned.number, first + 1)]
            assert unit.weight == (0 if rank is None else 2 / 12)
        loader._following = plan.advance(position), 0
        manager.decide(True)
    loader._stop_reading()


class Raises(Files):
    def shard(self, num_shards: int, index: int) -> Files:
        return Raises(**vars(super().shard(num_shards, index)))

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if sample[1:] == (4, 5):
                raise OSError("the file ends in the middle")
            yield sample


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_raises(workers: int) -> None:
    manager = Alone()
    loader = make(manager, Raises(LENGTHS), num_workers=workers)
    assert len(train(loader, 2)) == 2
    with pytest.raises(
        ReadFailed, match=r"(?s)unit 4 of batch 2 of epoch 0 could not be read: OSError: .*the file ends"
    ):
        train(loader)
    assert len(manager.errors) == 1, "the other groups are not notified"


def test_a_stream_without_samples_is_named() -> None:
    with pytest.raises(ReadFailed, match="ValueError: the stream, a Files, has no samples"):
        train(make(data=Files([0, 0])))
