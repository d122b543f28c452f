"""The samples of each step of a job that trains on a stream: a dataset without indices. Pure, free of torch.

A stream is read as *sources*, each of them sequential: shards of the dataset, or the dataset itself. The
samples of a source form blocks of ``micro_batch_size``. A batch takes the same number of blocks of each
source of its *turn*: batches take turns, so that a rank with few units in a batch has sources for several
worker processes. So a unit, that is a block, depends on the position alone, as in
:mod:`torchft.data.position`, and a group whose membership is unchanged reads its own sources only, in their
order.

Sources end at different places, which nobody knows before. The batches at the end of an epoch therefore lack
samples. A sample has the same weight in all batches: 1 / ``global_batch_size``. With its last block of a
batch, each source tells whether it has more, and the groups add that up together with the number of samples.
So all groups know which turns have ended, and leave out their batches; the epoch ends with the last turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Optional

from torchft.data.position import DataPlan, DataPosition, SamplesDiffer

# In the number that groups add up, the samples are below this bit, the sources that have more are above.
_MORE = 40
# No epoch of a stream has that many batches of 2**31 samples.
_ENDLESS = 2**31
# A worker process of a rank needs a source, and each turn of an epoch ends with a batch that lacks samples.
MOST_TURNS = 4


class Block(NamedTuple):
    """The place of a unit.

    Attributes:
        source: number of its source.
        number: number of the block in the source.
        last: whether the source's next block belongs to the next batch.
    """

    source: int
    number: int
    last: bool


@dataclass(frozen=True)
class StreamPlan(DataPlan):
    """The settings that determine the samples of each step. Made by :meth:`of`.

    All but the last batches of an epoch are full, and the plan has no end of an epoch by itself:
    :meth:`after` is given what the groups have counted.

    Args:
        sources: number of sources.
        turns: number of turns, which divides ``sources``.
    """

    sources: int = 1
    turns: int = 1

    _kind = "stream"
    _same_samples = ("sources", "turns", "global_batch_size", "micro_batch_size")
    compared = (*_same_samples, "epochs")

    @classmethod
    def of(
        cls, global_batch_size: int, micro_batch_size: int, epochs: int, shards: Optional[int]
    ) -> StreamPlan:
        """Chooses sources and turns: as many sources of a turn as divide the units of a batch, and up to
        MOST_TURNS turns.

        Args:
            global_batch_size, micro_batch_size, epochs: those of :class:`DataPlan`.
            shards: the largest number of shards into which the dataset can be cut; None: any number.

        Raises:
            ValueError: a setting is out of range.
        """
        checked = DataPlan(_ENDLESS, global_batch_size, micro_batch_size, False, 0, epochs)
        units = checked.global_batch_size // checked.micro_batch_size
        most = units * MOST_TURNS if shards is None else max(1, shards)
        of_turn = max(number for number in range(1, units + 1) if units % number == 0 and number <= most)
        turns = min(MOST_TURNS, most // of_turn)
        return cls(
            _ENDLESS * global_batch_size,
            global_batch_size,
            micro_batch_size,
            False,
            0,
            epochs,
            of_turn * turns,
            turns,
        )

    @cached_property
    def blocks(self) -> int:
        """The blocks of a source in each batch of its turn."""
        return self.global_batch_size // self.micro_batch_size * self.turns // self.sources

    def first_block(self, position: DataPosition) -> int:
        """The first block of each source that a batch may need."""
        return position.batch // self.turns * self.blocks

    def block(self, position: DataPosition, unit: int) -> Block:
        """The place of a unit of a batch."""
        number, slot = divmod(unit, self.blocks)
        rounds, turn = divmod(position.batch, self.turns)
        return Block(number * self.turns + turn, rounds * self.blocks + slot, last=slot == self.blocks - 1)

    def count(self, samples: int, more: int) -> int:
        """The number that a rank adds to the comparison.

        Args:
            samples: its samples that count.
            more: number of its sources that have samples for the next batch.
        """
        return samples + (more << _MORE)

    def next(self, position: DataPosition, ended: int) -> DataPosition:
        """Returns the position of the next batch of an epoch, or of the next epoch.

        Args:
            position: of a batch.
            ended: the turns of the epoch that have ended, as bits.
        """
        for batch in range(position.batch + 1, position.batch + 1 + self.turns):
            if not ended >> (batch % self.turns) & 1:
                return DataPosition(position.epoch, batch)
        return DataPosition(position.epoch + 1, 0)

    def after(self, position: DataPosition, ended: int, counted: int) -> tuple[DataPosition, int]:
        """Returns the position after a committed step, and the turns that have ended in its epoch, as bits.

        Args:
            position: of the step.
            ended: the turns that have ended before it.
            counted: the sum of what all ranks have counted, see :meth:`count`.

        Raises:
            SamplesDiffer: no such sum is possible; the step must not be committed.
        """
        more, samples = counted >> _MORE, counted % (1 << _MORE)
        # The sources of a turn may all be empty, which is noticed in its first batch.
        least = 0 if self.turns > 1 and position.batch < self.turns else 1
        if not least <= samples <= self.global_batch_size or not 0 <= more <= self.sources // self.turns:
            raise SamplesDiffer(
                f"batch {position.batch} of epoch {position.epoch}: {samples} samples were counted, and "
                f"{more} of {self.sources // self.turns} sources that have more; allowed are {least} to "
                f"{self.global_batch_size} samples. A stream must give the same samples whenever it is opened"
            )
        if not more:
            ended |= 1 << (position.batch % self.turns)
        following = self.next(position, ended)
        return following, ended if following.epoch == position.epoch else 0
