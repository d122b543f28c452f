"""Streams for tests, and a simulated job that trains on one while groups fail and join.

The job is adversarial: any groups may form the next quorum, a step may be lost at any moment, and a group may
begin with nothing. Reading is the real one. The oracle is a set: each sample of each epoch, once.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Optional

from torchft.data._prefetch import Key
from torchft.data._source_states import SourceStates
from torchft.data._stream_reader import StreamReader, StreamSource, shards_of
from torchft.data.position import DataPosition
from torchft.data.streams import StreamPlan

Sample = tuple[int, int, int]  # epoch, number of the file, number in the file


@dataclass
class Files:
    """A stream of files, which are its shards, with the methods of Hugging Face's streaming datasets.

    Attributes:
        lengths: samples of each file.
        num_shards: number of files.
        opened: how often it or a shard of it was opened.
        read: number of samples that were read.
    """

    lengths: list[int]
    files: Optional[list[int]] = None
    epoch: int = 0
    log: Counter[str] = field(default_factory=Counter)

    @property
    def num_shards(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Files:
        assert self.files is None, "a shard of a shard"
        return Files(self.lengths, list(range(len(self.lengths)))[index::num_shards], log=self.log)

    def __iter__(self) -> Iterator[Sample]:
        self.log["opened"] += 1
        epoch, files = self.epoch, list(range(len(self.lengths)) if self.files is None else self.files)
        random.Random(epoch).shuffle(files)
        for file in files:
            for number in range(self.lengths[file]):
                self.log["read"] += 1
                yield epoch, file, number

    def samples(self, epoch: int) -> set[Sample]:
        """The oracle."""
        return {(epoch, file, number) for file, length in enumerate(self.lengths) for number in range(length)}


class Skipping(Files):
    """Knows how to skip samples."""

    def shard(self, num_shards: int, index: int) -> Files:
        return Skipping(**vars(super().shard(num_shards, index)))

    def skip(self, number: int) -> Any:
        self.log["skipped"] += number
        rest = list(self)[number:]
        self.log["read"] -= number + len(rest)
        return rest


@dataclass
class Sequential:
    """A stream that cannot be cut."""

    length: int
    log: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Sample]:
        self.log["opened"] += 1
        for number in range(self.length):
            self.log["read"] += 1
            yield 0, 0, number

    def samples(self, epoch: int) -> set[Sample]:
        return {(0, 0, number) for number in range(self.length)}


class _State:
    """The state of a stream: the place after the last sample that its newest iterator has given.

    Attributes:
        at: number of samples that were given.
        begin: where the next iterator begins.
    """

    at = begin = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]

    def __iter__(self) -> Iterator[Sample]:
        begin, self.begin = self.begin, 0
        samples: Any = super().__iter__()  # type: ignore[misc]
        skipped = list(islice(samples, begin))
        self.log["read"] -= len(skipped)  # type: ignore[attr-defined]
        self.log["by state"] += len(skipped)  # type: ignore[attr-defined]
        for self.at, sample in enumerate(samples, begin + 1):
            yield sample


class Stateful(_State, Files):
    """Has a state."""

    def shard(self, num_shards: int, index: int) -> Files:
        return Stateful(**vars(super().shard(num_shards, index)))


class Whole(_State, Sequential):
    """Has a state, and cannot be cut."""


class Broken(AssertionError):
    """A violation of the guarantee."""


class Reader(StreamReader):
    """Takes the state of a source at random, and not at its times."""

    random = random.Random(0)

    def _save(self, number: int, source: StreamSource) -> Any:
        source.saves_at = self.random.choice([float("-inf"), float("inf")])
        return super()._save(number, source)


class Group:
    """A replica group: its position, and what it has opened. Subclasses make mistakes."""

    def __init__(self, dataset: Any, plan: StreamPlan, workers: int, batches: int) -> None:
        self.plan = plan
        self.position, self.ended = DataPosition(), 0
        self.states = SourceStates()
        self.readers = [Reader(copy.copy(dataset), plan, batches, SourceStates()) for _ in range(workers)]

    def read(self, position: DataPosition, unit: int) -> Any:
        source = self.plan.block(position, unit).source
        return self.readers[source % len(self.readers)].__getitems__(Key(position, unit))

    def took(self, read: Any) -> None:
        if read.saved is not None:
            self.states.put(read.saved, self.position.epoch, self.plan.first_block(self.position))

    def save(self) -> Any:
        return self.states.save(self.position.epoch, self.plan.first_block(self.position))

    def heal(self, position: DataPosition, ended: int, states: Any) -> None:
        self.position, self.ended = position, ended
        self.states.load(position.epoch, states)
        for reader in self.readers:  # worker processes that start then
            reader._states.load(position.epoch, states)

    def committed(self, counted: int) -> None:
        self.position, self.ended = self.plan.after(self.position, self.ended, counted)


def train(
    seed: int, make: type[Group] = Group, epochs: int = 3, dataset: Any = None
) -> tuple[Any, list[Counter[Sample]], list[list[Sample]]]:
    """Runs one history, with a dataset or a random one. Returns it, the committed samples by epoch, and by
    step.
    """
    rng = random.Random(seed)
    units, micro = rng.choice([1, 2, 4, 6, 8, 12]), rng.randint(1, 3)
    dataset = dataset or rng.choice(
        [
            Sequential(rng.randint(1, 60)),
            Files([rng.randint(0, 15) for _ in range(rng.randint(1, 30))]),
            Skipping([rng.randint(0, 15) for _ in range(rng.randint(1, 30))]),
            Stateful([rng.randint(0, 15) for _ in range(rng.randint(1, 30))]),
            Whole(rng.randint(1, 60)),
        ]
    )
    if isinstance(dataset, Files) and not dataset.samples(0):
        dataset.lengths[-1] = 1
    plan = StreamPlan.of(units * micro, micro, epochs, shards_of(dataset))
    data_ranks = rng.choice([1, 1, 1, 2, 3])
    ahead = rng.randint(0, 2)

    def begin(position: DataPosition, ended: int, states: Any) -> Group:
        group = make(dataset, plan, rng.randint(1, 3), ahead + 2)
        group.heal(position, ended, states)  # or from a checkpoint
        return group

    groups = [begin(DataPosition(), 0, [])]
    by_epoch: list[Counter[Sample]] = [Counter() for _ in range(epochs)]
    steps: list[list[Sample]] = []
    faults = rng.randint(0, 60)
    while groups[0].position != plan.end:
        if len(steps) > 2000:
            raise Broken("the job does not end")
        position, ended = groups[0].position, groups[0].ended
        if faults and rng.random() < 0.3:
            faults -= 1
            number = rng.choice([8, 4, 2, 1, 4])
            states = rng.choice(groups).save()
            groups = rng.sample(groups, min(len(groups), rng.randint(0, number)))
            groups += [begin(position, ended, states) for _ in range(number - len(groups))]
        counted, weights, samples = 0, 0.0, []
        for rank, group in enumerate(groups):
            if (group.position, group.ended) != (position, ended):
                raise Broken("groups are at different positions")
            for data_rank in range(data_ranks):
                share = plan.share(position, rank, len(groups), data_rank, data_ranks)
                for unit in share.units:
                    read = group.read(position, unit.number)
                    group.took(read)
                    if not read.data:
                        raise Broken("a pass without samples")
                    if unit.weight:
                        counted += plan.count(read.samples, read.more)
                        weights += read.samples * unit.weight / len(unit.indices)
                        samples += read.data[: read.samples]
                for unit in share.units if ahead else ():  # read ahead, for an unchanged membership
                    for batch in range(1, ahead + 1):
                        group.read(DataPosition(position.epoch, position.batch + batch), unit.number)
        if faults and rng.random() < 0.3:  # the step is lost, and comes again
            faults -= 1
            continue
        if round(weights * plan.global_batch_size, 6) != len(samples):
            raise Broken(f"{len(samples)} samples have the weight {weights}")
        if not samples and position.batch >= plan.turns:
            raise Broken("a step without samples")
        by_epoch[position.epoch].update(samples)
        steps.append(sorted(samples))
        for group in groups:
            group.committed(counted)
    return dataset, by_epoch, steps


def prove(seed: int, make: type[Group] = Group) -> tuple[Any, list[list[Sample]]]:
    """Runs one history, and checks it with the oracle. Returns the stream, and the samples of each step."""
    dataset, by_epoch, steps = train(seed, make)
    for epoch, seen in enumerate(by_epoch):
        if seen != Counter(dataset.samples(epoch)):
            raise Broken(f"seed {seed}: epoch {epoch} trained on {sorted(seen.elements())}")
    return dataset, steps
