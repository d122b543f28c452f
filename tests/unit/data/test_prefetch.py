"""Units are read ahead, and after changes of membership no unit is read twice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Callable, Optional

import pytest

from torchft.data._prefetch import Key, Prefetcher, ReadFailed, Task
from torchft.data.position import DataPlan, DataPosition

PLAN = DataPlan(length=48, global_batch_size=12, micro_batch_size=2, epochs=2)


class Reading:
    """A DataLoader that is always this many units ahead."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.read: list[Key] = []
        self.starts = 0
        self.fails_at: Optional[Key] = None
        self.interrupted_at: Optional[Key] = None
        self.prefetcher = Prefetcher(self.start)

    def start(self, tasks: Iterator[Task]) -> Iterator[tuple[int, ...]]:
        self.starts += 1
        under_way: list[Task] = []

        def read() -> tuple[int, ...]:
            for task in itertools.islice(tasks, self.ahead + 1 - len(under_way)):
                self.read.append(task.key)
                under_way.append(task)
            if not under_way:
                return ()
            task = under_way.pop(0)
            if task.key == self.interrupted_at:
                self.interrupted_at = None
                raise KeyboardInterrupt
            if task.key == self.fails_at:
                raise OSError("unreadable")
            return tuple(task.unit.indices)

        return _Results(read)

    def step(self, position: DataPosition, rank: int, participants: int) -> list[Key]:
        """Takes and checks the units of a step after a change."""
        self.prefetcher.expect(forecast(position, rank, participants))
        return self.take(position, rank, participants)

    def take(self, position: DataPosition, rank: int, participants: int) -> list[Key]:
        keys = []
        for unit in PLAN.share(position, rank, participants).units:
            keys.append(Key(position, unit.number))
            assert self.prefetcher.take(keys[-1]) == unit.indices
        return keys


class _Results(Iterator[tuple[int, ...]]):
    """Behaves like the DataLoader's iterator, which may continue after its end."""

    def __init__(self, read: Callable[[], tuple[int, ...]]) -> None:
        self._read = read

    def __next__(self) -> tuple[int, ...]:
        indices = self._read()
        if not indices:
            raise StopIteration
        return indices


def forecast(position: DataPosition, rank: int, participants: int) -> Iterator[Task]:
    while position != PLAN.end:
        for unit in PLAN.share(position, rank, participants).units:
            yield Task(Key(position, unit.number), unit)
        position = PLAN.advance(position)


@pytest.mark.parametrize("ahead", [0, 1, 4, 50])
def test_units_are_read_once_and_in_order_while_nothing_changes(ahead: int) -> None:
    reading = Reading(ahead)
    position = DataPosition()
    taken = reading.step(position, 1, 2)
    while (position := PLAN.advance(position)) != PLAN.end:
        taken += reading.take(position, 1, 2)
    assert reading.read == taken and reading.starts == 1 and reading.prefetcher.dropped == 0


def test_units_that_stay_with_this_rank_are_kept() -> None:
    reading = Reading(ahead=5)
    reading.step(DataPosition(), 0, 2)  # units 0 to 2 of each batch
    before = len(reading.read)
    assert before == 8
    taken = reading.step(DataPosition(0, 1), 0, 1)  # without peers it takes units 3 to 5, too
    assert [key.unit for key in taken] == [0, 1, 2, 3, 4, 5]
    assert reading.prefetcher.dropped == 0
    assert len(set(reading.read)) == len(reading.read), "a unit was read twice"


def test_units_of_another_rank_are_dropped() -> None:
    reading = Reading(ahead=5)
    reading.step(DataPosition(), 0, 1)
    assert len(reading.read) == 11
    reading.step(DataPosition(0, 1), 1, 2)  # units 3 to 5 of batch 1
    reading.take(DataPosition(0, 2), 1, 2)
    assert reading.prefetcher.dropped == 3
    assert len(set(reading.read)) == len(reading.read)


def test_a_step_that_is_lost_is_read_again() -> None:
    reading = Reading(ahead=2)
    first = reading.step(DataPosition(), 0, 2)
    assert reading.step(DataPosition(), 0, 2) == first
    reading.take(DataPosition(0, 1), 0, 2)
    assert reading.prefetcher.dropped == 0


def test_more_after_the_end_of_a_forecast() -> None:
    """The last step is lost because a group failed. The remaining group has to read the units of the failed
    one after its own reading has ended.
    """
    reading = Reading(ahead=3)
    last = DataPosition(1, 3)
    reading.step(last, 0, 2)
    assert [key.unit for key in reading.step(last, 0, 1)] == [0, 1, 2, 3, 4, 5]


def test_a_group_that_is_alone_then_not_reads_each_unit_that_it_takes() -> None:
    """Several changes of rank and size, for different numbers of units read ahead."""
    for ahead in (0, 1, 3, 7, 20):
        reading = Reading(ahead)
        position = DataPosition()
        for rank, participants in [(0, 1), (2, 3), (0, 2), (0, 2), (1, 2), (0, 1), (3, 4), (0, 3)]:
            reading.step(position, rank, participants)
            position = PLAN.advance(position)
        assert position == PLAN.end


def test_a_failure_belongs_to_the_unit_that_could_not_be_read() -> None:
    """Unit 3 of batch 1 goes to another rank before it is taken."""
    reading = Reading(ahead=8)
    reading.fails_at = Key(DataPosition(0, 1), 3)
    reading.step(DataPosition(), 0, 1)
    reading.step(DataPosition(0, 1), 0, 2)
    reading.take(DataPosition(0, 2), 0, 2)


def test_a_unit_that_cannot_be_read_is_named_and_can_be_tried_again() -> None:
    reading = Reading(ahead=1)
    reading.fails_at = Key(DataPosition(), 1)
    with pytest.raises(ReadFailed, match="OSError: unreadable"):
        reading.step(DataPosition(), 0, 2)
    reading.fails_at = None
    reading.step(DataPosition(), 0, 2)


def test_after_an_interrupt_each_unit_has_its_own_samples() -> None:
    """A notebook may go on after Ctrl-C."""
    reading = Reading(ahead=1)
    reading.interrupted_at = Key(DataPosition(), 1)
    with pytest.raises(KeyboardInterrupt):
        reading.step(DataPosition(), 0, 2)
    reading.step(DataPosition(), 0, 2)
    reading.take(DataPosition(0, 1), 0, 2)


def test_a_reader_that_ends_early_is_named() -> None:
    prefetcher = Prefetcher(lambda tasks: iter([next(tasks) for _ in range(3)][:2]))
    prefetcher.expect(forecast(DataPosition(), 0, 1))
    for unit in range(2):
        prefetcher.take(Key(DataPosition(), unit))
    with pytest.raises(ReadFailed, match="ended before it gave all"):
        prefetcher.take(Key(DataPosition(), 2))


def test_a_unit_outside_of_the_forecast_is_an_error() -> None:
    prefetcher = Prefetcher(lambda tasks: iter(()))
    with pytest.raises(KeyError, match="not in the forecast"):
        prefetcher.take(Key(DataPosition(), 0))
