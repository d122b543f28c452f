"""Reads the units of a rank with PyTorch's DataLoader, in one lane or in several.

The worker processes of one DataLoader take units in turns, which suits samples with an index. A worker that
reads a stream must read the same sources in each batch, so a stream has a DataLoader with one worker for each
of them: a lane.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch.utils.data import DataLoader, default_collate

from torchft._manager.signals import installed
from torchft.data._prefetch import Feed, Key, Prefetcher, Task
from torchft.data._source_states import SourceStates
from torchft.data._stream_reader import Collate, StreamReader
from torchft.data.streams import StreamPlan
from torchft.data.workers import WorkerInit

logger: logging.Logger = logging.getLogger(__name__)

Seed = Callable[[Key], int]

# Seconds within which forked workers begin, in each attempt.
_BEGIN_S = (10.0, 20.0, 40.0)


class WorkersHang(RuntimeError):
    """Worker processes do not begin. A lock that another thread holds at a fork stays locked in the child,
    and PyTorch's workers first seed their random numbers, which takes several locks.
    """


class Lane:
    """A DataLoader that reads the units of a forecast.

    Args:
        dataset: map-style; its indices are items of ``batches``.
        batches: gives the DataLoader its batches of indices.
        dataloader: arguments of the DataLoader.
    """

    def __init__(self, dataset: Any, batches: Batches, **dataloader: Any) -> None:
        self._batches = batches
        self.dataloader = DataLoader(dataset, batch_sampler=batches, **dataloader)
        self._worker_init_fn = self.dataloader.worker_init_fn
        self._reader: Any = None  # the DataLoader's iterator
        self.prefetcher = Prefetcher(self._start)

    def _start(self, tasks: Feed) -> Iterator[Any]:
        self._batches.tasks = tasks
        for seconds in _BEGIN_S:
            begun = multiprocessing.get_context("fork").Semaphore(0) if self._forks() else None
            self.dataloader.worker_init_fn = WorkerInit(installed(), self._worker_init_fn, begun)
            self._reader = iter(self.dataloader)
            deadline = time.monotonic() + seconds
            if begun is None or all(
                begun.acquire(timeout=max(0.0, deadline - time.monotonic()))
                for _ in range(self.dataloader.num_workers)
            ):
                return self._reader
            logger.warning("worker processes did not begin within %g s: they are started again", seconds)
            self._end_workers()
            tasks.again()
        raise WorkersHang(
            f"worker processes did not begin in {len(_BEGIN_S)} attempts: they were forked while another "
            "thread held a lock; give multiprocessing_context='forkserver'"
        )

    def _forks(self) -> bool:
        if self.dataloader._iterator is not None:  # persistent workers, which have begun
            return False
        context = self.dataloader.multiprocessing_context or multiprocessing
        return self.dataloader.num_workers > 0 and context.get_start_method() == "fork"

    def stop(self) -> None:
        """Ends the worker processes. Reading starts again with the next unit that is taken."""
        self.prefetcher.close()
        self._end_workers()

    def _end_workers(self) -> None:
        if hasattr(self._reader, "_shutdown_workers"):
            # The iterator does so itself when its last reference is dropped. But that may happen late,
            # because persistent_workers and the traceback of an error keep references, or in a worker that is
            # forked later.
            # From PyTorch's handler of SIGCHLD, for a worker that was killed.
            with contextlib.suppress(RuntimeError):
                self._reader._shutdown_workers()
        self._reader = self.dataloader._iterator = None


class Lanes:
    """The lanes of a rank.

    Args:
        lanes: at least one.
        lane_of: number of the lane that reads a unit.
        turns: number of batches after which the lanes of units come again.
    """

    def __init__(self, lanes: list[Lane], lane_of: Callable[[Key], int], turns: int = 1) -> None:
        self.lanes = lanes
        self._lane_of = lane_of
        self._turns = turns

    def expect(self, forecast: Callable[[], Iterator[Task]]) -> None:
        """Sets the units that will be taken. `forecast`: returns an iterator over them. All batches but the
        first have the same units, if there is more than one lane.
        """
        for number, lane in enumerate(self.lanes):
            tasks = forecast()
            lane.prefetcher.expect(self._of_lane(number, tasks) if len(self.lanes) > 1 else tasks)

    def _of_lane(self, number: int, forecast: Iterator[Task]) -> Iterator[Task]:
        """The tasks of a lane. Ends where a lane has nothing to read for an unchanged membership, since the
        forecast may be endless.
        """
        idle = 0
        for later, (_, batch) in enumerate(itertools.groupby(forecast, lambda task: task.key.position)):
            own = [task for task in batch if self._lane_of(task.key) == number]
            idle = 0 if own or not later else idle + 1
            if idle == self._turns:
                return
            yield from own

    def take(self, key: Key) -> Any:
        """Returns a unit of the forecast, each lane's in their order. ReadFailed: it could not be read."""
        return self.lanes[self._lane_of(key)].prefetcher.take(key)

    def stop(self) -> None:
        """Ends the worker processes of all lanes."""
        for lane in self.lanes:
            lane.stop()


def lanes_of_indices(dataset: Any, seed: Optional[Seed], **dataloader: Any) -> Lanes:
    """One lane for a map-style dataset.

    Args:
        dataset: the dataset.
        seed: gives the seed of a unit's random numbers; None: they are not seeded.
        dataloader: arguments of the DataLoader.
    """
    read: Any = dataset if seed is None else _Seeded(dataset)
    return Lanes([Lane(read, Batches(seed), **dataloader)], lambda key: 0)


def lanes_of_stream(dataset: Any, plan: StreamPlan, states: SourceStates, **dataloader: Any) -> Lanes:
    """A lane for each worker process, or one if there are none.

    Args:
        dataset: the stream.
        plan: of the job.
        states: of its sources; workers have those of the moment at which they start.
        dataloader: arguments of the DataLoader.

    Raises:
        ValueError: worker processes of the DataLoader would have to start those of the stream.
    """
    collate = Collate(dataloader.pop("collate_fn", None) or default_collate)
    workers = dataloader.pop("num_workers", 0)
    # A lost step asks for its batch again, and a change of membership for what was read ahead.
    ahead = (dataloader.get("prefetch_factor") or 2) if workers else 0
    if workers:
        own = getattr(dataset, "num_workers", 0)
        if isinstance(own, int) and own > 0:
            raise ValueError(
                f"num_workers is {workers}, and the dataset is a {type(dataset).__name__} with "
                f"num_workers={own}: worker processes cannot start others; give one of them num_workers=0"
            )
        dataloader["num_workers"] = 1
    count = min(max(1, workers), plan.sources)
    lanes = [
        Lane(StreamReader(dataset, plan, ahead + 2, states), Units(), collate_fn=collate, **dataloader)
        for _ in range(count)
    ]
    return Lanes(lanes, lambda key: plan.block(key.position, key.unit).source % count, plan.turns)


class _SeededIndices(list[int]):
    """The indices of a unit, and the seed of its random numbers."""

    seed: int = 0


class Batches(Iterator[Any]):
    """The batch sampler of PyTorch's DataLoader. `seed`: see :func:`lanes_of_indices`."""

    def __init__(self, seed: Optional[Seed] = None) -> None:
        self.tasks: Iterator[Task] = iter(())
        self._seed = seed

    def __next__(self) -> Any:
        task = next(self.tasks)
        if self._seed is None:
            return list(task.unit.indices)
        indices = _SeededIndices(task.unit.indices)
        indices.seed = self._seed(task.key)
        return indices


class Units(Batches):
    """Gives the keys of units, for a :class:`StreamReader`."""

    def __next__(self) -> Key:
        return next(self.tasks).key


@dataclass(frozen=True)
class _Seeded:
    """A dataset whose random numbers depend only on the unit."""

    dataset: Any

    def __getitems__(self, indices: _SeededIndices) -> list[Any]:
        with _seeded(indices.seed):
            if hasattr(self.dataset, "__getitems__"):
                return self.dataset.__getitems__(indices)
            return [self.dataset[index] for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A context with seeded random numbers, which restores the generators' states at its end."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy.random.get_state() if numpy is not None else None, _torch_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def _torch_state() -> torch.Tensor:
    """The state of torch's default generator, read without a garbage collection.

    PyTorch holds the generator's mutex while it allocates the result. A collection there may release Python's
    lock, and another thread that takes it, and wants the mutex, would never give it back.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return torch.default_generator.get_state()
    finally:
        if collects:
            gc.enable()
