"""Reads units of a stream: opens its sources, skips to a position, and keeps what may be read again.

A reader runs in a worker process of PyTorch's DataLoader, or in the rank itself. It is deaf to the groups:
whichever block it is asked for, it gives.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Callable, NamedTuple, Optional

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker

from torchft.data._prefetch import Key
from torchft.data._source_states import NotLoaded, Saved, SourceStates, has_state, load, save
from torchft.data.position import DataPosition
from torchft.data.streams import StreamPlan

logger: logging.Logger = logging.getLogger(__name__)

# Least time between two states of a source, in times of taking those of all sources of a reader. A state may
# be as large as a shuffle buffer, and is copied between processes besides.
_INTERVAL = 200


class Read(NamedTuple):
    """A unit that was read.

    Attributes:
        data: the samples, or what the collate function made of them; if the unit has none, those of another
            unit, for a pass with weight 0.
        samples: the number of its samples, 0 or more.
        more: whether its source has samples for the next batch; told with the last unit of each source in a
            batch.
        saved: the state of its source after some block, if one was taken.
    """

    data: Any
    samples: int
    more: bool
    saved: Optional[Saved] = None


class StreamSource:
    """One epoch of a source, open at some block.

    Args:
        samples: the samples from block ``first`` on.
        first: number of that block.
        size: samples of a block.
        keep: number of blocks that are kept: a lost step asks for some again.
        data: the dataset that has the state of ``samples``; None: it has none.

    Attributes:
        data: see above.
        saves_at: when its next state is taken, in seconds of the monotonic clock.
    """

    def __init__(self, samples: Iterator[Any], first: int, size: int, keep: int, data: Any = None) -> None:
        self.data = data
        self.saves_at = float("-inf")
        self._samples = samples
        self._size = size
        self._ahead: list[Any] = []  # at most one sample
        self._kept: deque[list[Any]] = deque(maxlen=keep)
        self._next = first

    @property
    def next(self) -> int:
        """The block that is read next."""
        return self._next

    @property
    def at_block(self) -> bool:
        """Whether the last sample that was read is the last one of a full block."""
        return not self._ahead and bool(self._kept) and len(self._kept[-1]) == self._size

    def has(self, number: int) -> bool:
        """Whether a block can be read without opening the source again."""
        return number >= self._next - len(self._kept)

    def block(self, number: int) -> list[Any]:
        """The samples of a block: fewer than ``size``, or none, where the source ends."""
        while self._next <= number:
            ahead, self._ahead = self._ahead, []
            self._kept.append(ahead + list(islice(self._samples, self._size - len(ahead))))
            self._next += 1
        return self._kept[number - self._next]

    def has_after(self, number: int) -> bool:
        """Whether there are samples after a block that was read."""
        if number + 1 < self._next:
            return bool(self.block(number + 1))
        self._ahead = self._ahead or list(islice(self._samples, 1))
        return bool(self._ahead)


class StreamReader:
    """A map-style dataset, for PyTorch's DataLoader, whose indices are units of a stream.

    Args:
        dataset: the stream.
        plan: of the job.
        batches: number of batches for which blocks are kept.
        states: states of sources, from which one that is opened may continue.
    """

    def __init__(self, dataset: Any, plan: StreamPlan, batches: int, states: SourceStates) -> None:
        self._dataset = dataset
        self._plan = plan
        self._keep = batches * plan.blocks
        self._states = states
        self._epoch = -1
        self._sources: dict[int, StreamSource] = {}
        self._filler: list[Any] = []

    def __getitems__(self, key: Key) -> Read:
        position = key.position
        if position.epoch != self._epoch:
            self._sources.clear()
            self._epoch = position.epoch
        block = self._plan.block(position, key.unit)
        try:
            source = self._source(block.source, block.number, position)
            samples = source.block(block.number)
            saved = self._save(block.source, source) if source.data is not None else None
            more = block.last and source.has_after(block.number)
        except BaseException:
            # An iterator that has raised has ended, and samples that it gave before are not kept.
            self._sources.pop(block.source, None)
            raise
        if samples:
            self._filler = samples
        return Read(samples or self._any_samples(), len(samples), more, saved)

    def __getitem__(self, key: Key) -> Read:
        return self.__getitems__(key)

    def _source(self, number: int, block: int, position: DataPosition) -> StreamSource:
        """A source from which a block can be read."""
        first = self._plan.first_block(position)
        source = self._sources.get(number)
        if source is not None and not source.has(block):
            source = None
        if source is not None and source.next >= first:
            return source
        saved = self._states.before(self._epoch, number, first)
        if source is not None and (saved is None or saved.block <= source.next):
            return source
        # From the begin of the batch: this rank may get other blocks of it.
        data, samples = self._open(number, first, saved)
        source = StreamSource(
            samples, first, self._plan.micro_batch_size, self._keep, data if has_state(data) else None
        )
        self._sources[number] = source
        return source

    def _open(self, number: int, first: int, saved: Optional[Saved]) -> tuple[Any, Iterator[Any]]:
        """Opens a source before a block: by state, ``skip`` or reading. Returns its dataset, and samples."""
        data = self._shard(number)
        blocks = first
        if saved is not None and has_state(data) and self._load(data, saved):
            blocks -= saved.block
        skipped = blocks * self._plan.micro_batch_size
        if skipped and hasattr(data, "skip"):
            data, skipped = data.skip(skipped), 0
            _set_epoch(data, self._epoch)
        samples = iter(data)
        deque(islice(samples, skipped), maxlen=0)
        return data, samples

    def _shard(self, number: int) -> Any:
        # A dataset that finds itself in a worker process reads a part only, or in another order (Hugging
        # Face's shuffle); a source must be the same whoever reads it.
        worker._worker_info = None
        data = self._dataset
        _set_epoch(data, self._epoch)
        if self._plan.sources > 1:
            data = data.shard(num_shards=self._plan.sources, index=number)
            _set_epoch(data, self._epoch)
        return data

    def _load(self, data: Any, saved: Saved) -> bool:
        try:
            state = load(saved.state)
        except NotLoaded as e:
            logger.warning(
                "source %d of the stream is read from its begin up to block %d: %s",
                saved.source,
                saved.block,
                e,
            )
            return False
        data.load_state_dict(state)
        return True

    def _save(self, number: int, source: StreamSource) -> Optional[Saved]:
        """The state of a source, if it is due, and belongs to a block."""
        begin = time.monotonic()
        if not source.at_block or begin < source.saves_at:
            return None
        state = save(source.data.state_dict())
        end = time.monotonic()
        source.saves_at = end + _INTERVAL * len(self._sources) * (end - begin)
        return Saved(self._epoch, number, source.next, state)

    def _any_samples(self) -> list[Any]:
        """Samples for a pass with weight 0."""
        number = 0
        while not self._filler:
            if number == self._plan.sources:
                raise ValueError(f"the stream, a {type(self._dataset).__name__}, has no samples")
            self._filler = list(islice(self._open(number, 0, None)[1], 1))
            number += 1
        return self._filler


def _set_epoch(data: Any, epoch: int) -> None:
    # A DataLoader, as torchdata's StatefulDataLoader, leaves this to its dataset.
    for each in (data, getattr(data, "dataset", None)):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


class Collate:
    """The collate function of a :class:`StreamReader`. `collate`: of the samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, read: Read) -> Read:
        return read._replace(data=self._collate(read.data))


def is_stream(dataset: Any) -> bool:
    """Whether a dataset has samples in an order, and not by index."""
    if isinstance(dataset, IterableDataset):  # its base class has __getitem__
        return True
    by_index = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return hasattr(dataset, "__iter__") and not by_index


def shards_of(dataset: Any) -> Optional[int]:
    """The most shards that a stream can be cut into; None: any number. TypeError: it is read once only."""
    if isinstance(dataset, Iterator):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, an iterator, which can be read once: a group that takes "
            "over the part of another one opens it again. Give an object whose __iter__ begins anew"
        )
    if not hasattr(dataset, "shard"):
        return 1
    for name in ("num_shards", "n_shards"):
        number = getattr(dataset, name, None)
        if isinstance(number, int):
            return number
    return None
