"""Reading of a stream: sources are opened once, and skipped to a position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest
from torch.utils.data import IterableDataset, TensorDataset

from tests.unit.data.streaming import Files, Sequential, Skipping, Whole
from torchft.data import _stream_reader
from torchft.data._prefetch import Key
from torchft.data._source_states import SourceStates
from torchft.data._stream_reader import Collate, Read, StreamReader, StreamSource, is_stream, shards_of
from torchft.data.position import DataPosition
from torchft.data.streams import StreamPlan


def reader(
    dataset: Any, units: int = 4, micro: int = 2, batches: int = 2, states: Optional[SourceStates] = None
) -> StreamReader:
    plan = StreamPlan.of(units * micro, micro, 3, shards_of(dataset))
    return StreamReader(dataset, plan, batches, states or SourceStates())


def read(of: StreamReader, batch: int, unit: int, epoch: int = 0) -> Read:
    return of.__getitems__(Key(DataPosition(epoch, batch), unit))


def test_blocks_of_a_source() -> None:
    source = StreamSource(iter(range(7)), first=3, size=2, keep=2)
    assert source.block(3) == [0, 1] and source.block(4) == [2, 3] and source.block(3) == [0, 1]
    assert source.has(3) and not source.has(2)
    assert source.has_after(3) and source.has_after(4)
    assert source.block(5) == [4, 5]
    assert not source.has(3)
    assert source.has_after(5) and source.block(6) == [6] and not source.has_after(6)
    assert source.block(9) == [] and not source.has_after(9) and not source.has_after(8)


def test_a_stream_that_cannot_be_cut_is_read_once_in_its_order() -> None:
    data = Sequential(20)
    one = reader(data)
    found = [read(one, batch, unit) for batch in range(3) for unit in range(4)]
    assert [number for each in found for _, _, number in each.data[: each.samples]] == list(range(20))
    assert [each.samples for each in found] == 10 * [2] + 2 * [0]
    assert [each.more for each in found] == 3 * [False] + [True] + 3 * [False] + [True] + 4 * [False]
    assert all(each.data for each in found), "a pass without samples"
    assert data.log == {"opened": 1, "read": 20}


def test_shards_are_read_side_by_side() -> None:
    data = Files([5, 8, 2, 0])
    one = reader(data)
    found = [[read(one, batch, unit) for unit in range(4)] for batch in range(4)]
    assert [[each.samples for each in batch] for batch in found] == [
        [2, 2, 2, 0],
        [2, 2, 0, 0],
        [1, 2, 0, 0],
        [0, 2, 0, 0],
    ]
    assert [[each.more for each in batch] for batch in found] == [
        [True, True, False, False],
        [True, True, False, False],
        [False, True, False, False],
        [False, False, False, False],
    ]
    assert {s for batch in found for each in batch for s in each.data[: each.samples]} == data.samples(0)
    assert data.log == {"opened": 4, "read": 15}


@pytest.mark.parametrize("make", [Files, Skipping])
def test_a_new_owner_skips(make: Any) -> None:
    data = make([50, 50, 50, 50])
    one = reader(data)
    assert read(one, 20, 2).data == [(0, 2, 40), (0, 2, 41)]
    log = {"opened": 1, "read": 43} if make is Files else {"opened": 1, "read": 0, "skipped": 40}
    assert data.log == log  # and one sample ahead


def test_a_lost_step_is_read_from_memory() -> None:
    data = Files([50, 50, 50, 50])
    one = reader(data)
    for batch in (0, 1, 2, 3, 4, 3, 4, 4, 5, 4):
        assert [read(one, batch, unit).data[0] for unit in range(4)] == [(0, f, 2 * batch) for f in range(4)]
    assert data.log["opened"] == 4
    assert read(one, 0, 1).data[0] == (0, 1, 0)  # further back it is opened again
    assert data.log["opened"] == 5


def test_a_source_that_has_raised_is_opened_again() -> None:
    """Its iterator has ended by the error, which is not the end of the source."""

    class Breaks(Sequential):
        broken = True

        def __iter__(self) -> Any:
            for sample in super().__iter__():
                if sample[2] == 5 and self.broken:
                    self.broken = False
                    raise OSError
                yield sample

    one = reader(Breaks(8))
    assert read(one, 0, 0).data[0] == (0, 0, 0)
    with pytest.raises(OSError):  # noqa: PT011
        read(one, 0, 2)
    assert [read(one, 0, unit).data for unit in (1, 2, 3)] == [
        [(0, 0, first), (0, 0, first + 1)] for first in (2, 4, 6)
    ]


def test_other_units_of_a_batch_are_kept() -> None:
    """A change of membership gives this rank other blocks of the same batch."""
    data = Sequential(100)
    one = reader(data)
    for unit in (3, 2, 0, 1, 3):
        assert read(one, 7, unit).data[0] == (0, 0, 7 * 8 + 2 * unit)
    assert data.log["opened"] == 1


def test_states_take_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]

    class Slow(Whole):
        def state_dict(self) -> Any:
            now[0] += 0.5
            return super().state_dict()

    monkeypatch.setattr(_stream_reader, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = reader(Slow(100))
    assert [read(one, 0, unit).saved is not None for unit in range(3)] == [True, False, False]
    now[0] += 99.9
    assert read(one, 1, 0).saved is None
    now[0] += 0.1
    assert read(one, 1, 1).saved is not None


def test_each_epoch_is_opened_with_its_number() -> None:
    data = Files(7 * [4])
    one = reader(data)
    orders = []
    for epoch in (0, 1, 2):
        found = [read(one, batch, unit, epoch) for batch in range(4) for unit in range(4)]
        order = [s for each in found for s in each.data[: each.samples]]
        assert set(order) == data.samples(epoch)
        orders.append([file for _, file, _ in order])
    assert orders[0] != orders[1] or orders[1] != orders[2]


def test_an_empty_stream_is_named() -> None:
    with pytest.raises(ValueError, match="the stream, a Files, has no samples"):
        read(reader(Files([0, 0, 0, 0])), 0, 0)


def test_an_empty_unit_gets_other_samples() -> None:
    data = Files([0, 0, 3, 0])
    found = read(reader(data), 0, 0)
    assert (found.data, found.samples, found.more) == ([(0, 2, 0)], 0, False)
    assert Collate(len)(found) == Read(1, 0, False)


class Torchs(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "stream", "shards"),
    [
        (Torchs(), True, 1),
        (Files([1, 2, 3]), True, 3),
        (Sequential(3), True, 1),
        ([1, 2], False, None),
        (TensorDataset(), False, None),
        (3, False, None),
    ],
)
def test_what_is_a_stream(dataset: Any, stream: bool, shards: int) -> None:
    assert is_stream(dataset) is stream
    if stream:
        assert shards_of(dataset) == shards


def test_any_number_of_shards() -> None:
    class Cut(Sequential):
        def shard(self, num_shards: int, index: int) -> Any:
            raise AssertionError("opened")

    assert shards_of(Cut(3)) is None


def test_an_iterator_is_refused() -> None:
    with pytest.raises(TypeError, match="dataset is a list_iterator, an iterator, which can be read once"):
        shards_of(iter([1]))
