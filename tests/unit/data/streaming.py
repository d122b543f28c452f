"""Streams for tests, and a simulated job that trains on one while groups fail and join.

The job is adversarial: any groups may form the next quorum, a step may be lost at any moment, and a group may
begin with nothing. Reading is the real one. The oracle is a set: each sample of each epoch, once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

from torchft.data._prefetch import Key
from torchft.data._stream_reader import StreamReader, shards_of
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


class Broken(AssertionError):
    """A violation of the guarantee."""


class Group:
    """A replica group: its position, and what it has opened. Subclasses make mistakes."""

    def __init__(self, dataset: Any, plan: StreamPlan, workers: int, batches: int) -> None:
        self.plan = plan
        self.position, self.ended = DataPosition(), 0
        self.readers = [StreamReader(dataset, plan, batches) for _ in range(workers)]

    def read(self, position: DataPosition, unit: int) -> Any:
        source = self.plan.block(position, unit).source
        return self.readers[source % len(self.readers)].__getitems__(Key(position, unit))

    def committed(self, counted: int) -> None:
        self.position, self.ended = self.plan.after(self.position, self.ended, counted)


def train(
    seed: int, make: type[Group] = Group, epochs: int = 3
) -> tuple[Any, list[Counter[Sample]], list[list[Sample]]]:
    """Runs one history. Returns the stream, the committed samples by epoch, and by step."""
    rng = random.Random(seed)
    units, micro = rng.choice([1, 2, 4, 6, 8, 12]), rng.randint(1, 3)
    dataset: Any = rng.choice(
        [
            Sequential(rng.randint(1, 60)),
            Files([rng.randint(0, 15) for _ in range(rng.randint(1, 30))]),
            Skipping([rng.randint(0, 15) for _ in range(rng.randint(1, 30))]),
        ]
    )
    if not dataset.samples(0):
        dataset.lengths[-1] = 1
    plan = StreamPlan.of(units * micro, micro, epochs, shards_of(dataset))
    data_ranks = rng.choice([1, 1, 1, 2, 3])
    ahead = rng.randint(0, 2)

    def begin(position: DataPosition, ended: int) -> Group:
        group = make(dataset, plan, rng.randint(1, 3), ahead + 2)
        group.position, group.ended = position, ended  # by a heal, or from a checkpoint
        return group

    groups = [begin(DataPosition(), 0)]
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
            groups = rng.sample(groups, min(len(groups), rng.randint(0, number)))
            groups += [begin(position, ended) for _ in range(number - len(groups))]
        counted, weights, samples = 0, 0.0, []
        for rank, group in enumerate(groups):
            if (group.position, group.ended) != (position, ended):
                raise Broken("groups are at different positions")
            for data_rank in range(data_ranks):
                share = plan.share(position, rank, len(groups), data_rank, data_ranks)
                for unit in share.units:
                    read = group.read(position, unit.number)
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


def prove(seed: int, make: type[Group] = Group) -> list[list[Sample]]:
    """Runs one history, and checks it with the oracle. Returns the samples of each step."""
    dataset, by_epoch, steps = train(seed, make)
    for epoch, seen in enumerate(by_epoch):
        if seen != Counter(dataset.samples(epoch)):
            raise Broken(f"seed {seed}: epoch {epoch} trained on {sorted(seen.elements())}")
    return steps
