"""Reads units ahead with PyTorch's DataLoader, although the rank that computes a unit may change at any step.

The DataLoader takes its batches from a forecast: the units that this rank computes if membership does not
change. When membership changes, a new forecast is made. Units of the old forecast that are being read are
kept if the new one contains them, and otherwise dropped when they arrive.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

from torchft.data.position import DataPosition, PlannedUnit


class Key(NamedTuple):
    """Identifies a unit of a job."""

    position: DataPosition
    unit: int


@dataclass(frozen=True)
class Task:
    """A unit to read."""

    key: Key
    unit: PlannedUnit


@dataclass(frozen=True)
class _Failed:
    error: Exception


class ReadFailed(RuntimeError):
    """The dataset, the collate function or a worker process raised an error."""


class Prefetcher:
    """Yields the units of one rank in the order of its forecast. `start`: begins to read, given an iterator
    over tasks; returns an iterator over the units in the same order. It may take many tasks before it returns
    the first unit. An iterator that has ended may continue later.
    """

    def __init__(self, start: Callable[[Feed], Iterator[Any]]) -> None:
        self._start = start
        self._tasks: Iterator[Task] = iter(())
        self._results: Optional[Iterator[Any]] = None
        self._under_way: deque[Optional[Task]] = deque()  # None for a unit that is no longer needed
        self._ready: dict[Key, list[Any]] = {}
        self.dropped = 0  # units that were read and not needed

    def expect(self, forecast: Iterable[Task]) -> None:
        """Sets the units that will be taken. The iterator is consumed gradually, because it may contain all
        units up to the end of the job.
        """
        tasks = iter(forecast)
        have = Counter(task.key for task in self._under_way if task is not None)
        have.update({key: len(units) for key, units in self._ready.items()})
        horizon = max(have, default=None)
        new: list[Task] = []
        for task in tasks:
            if horizon is None or task.key.position > horizon.position:
                new.append(task)
                break
            if have[task.key] > 0:
                have[task.key] -= 1
            else:
                new.append(task)
        self._forget(+have)
        self._tasks = itertools.chain(new, tasks)

    def _forget(self, stale: Counter[Key]) -> None:
        for key in [key for key in self._ready if stale[key] > 0]:
            count = min(stale[key], len(self._ready[key]))
            del self._ready[key][:count]
            stale[key] -= count
            self.dropped += count
            if not self._ready[key]:
                del self._ready[key]
        for i, task in enumerate(self._under_way):
            if task is not None and stale[task.key] > 0:
                stale[task.key] -= 1
                self._under_way[i] = None

    def take(self, key: Key) -> Any:
        """Returns the next unit of the forecast once it has been read. ReadFailed: it could not be read."""
        while key not in self._ready:
            self._receive(key)
        units = self._ready[key]
        data = units.pop(0)
        if not units:
            del self._ready[key]
        if isinstance(data, _Failed):
            self._under_way.clear()
            self._results = None  # the iterator may have lost a worker process
            raise ReadFailed(f"{type(data.error).__name__}: {data.error}") from data.error
        return data

    def close(self) -> None:
        """Ends reading and the worker processes; a later :meth:`take` restarts both."""
        self._results = None
        self._under_way.clear()
        self._ready.clear()

    def _receive(self, wanted: Key) -> None:
        data: Any
        try:
            if self._results is None:
                self._results = self._start(Feed(self))
            data = next(self._results)
        except StopIteration:
            # The iterator ended because there were no tasks; now there are new ones.
            self._results = None
            if self._under_way:
                raise ReadFailed("the DataLoader ended before it gave all that it was asked for") from None
            if not self._has_task():
                raise KeyError(f"{wanted} is not in the forecast") from None
            return
        except Exception as e:
            data = _Failed(e)  # raised when this unit is taken
        except BaseException:  # Ctrl-C: the iterator may have lost a unit: all later ones had a wrong key
            self._results = None
            self._under_way.clear()
            raise
        if not self._under_way:
            self._ready.setdefault(wanted, []).append(data)
        elif (task := self._under_way.popleft()) is None:
            self.dropped += 1
        else:
            self._ready.setdefault(task.key, []).append(data)

    def _has_task(self) -> bool:
        task = next(self._tasks, None)
        if task is not None:
            self._tasks = itertools.chain([task], self._tasks)
        return task is not None


class Feed(Iterator[Task]):
    """The sampler of the DataLoader. Not a generator, because it may continue after its end."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def __next__(self) -> Task:
        task = next(self._prefetcher._tasks)
        self._prefetcher._under_way.append(task)
        return task

    def again(self) -> None:
        """Gives the tasks that are under way again, of which nothing was read."""
        of = self._prefetcher
        given = [task for task in of._under_way if task is not None]
        of._tasks = itertools.chain(given, of._tasks)
        of._under_way.clear()
