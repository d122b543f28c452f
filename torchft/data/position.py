"""The samples of each step of a job, independent of its participants. Pure, and free of torch.

An epoch is a permutation of the dataset. A *batch* is a slice of it, and a *unit* a slice of a batch: so
units depend only on the :class:`DataPlan` and the :class:`DataPosition`. The groups of a quorum share the
units of one batch (:meth:`DataPlan.share`); a step that is not committed is divided again in the next quorum,
from the same units. The position is state like the weights: it advances when a step is committed, it arrives
with a heal, and a checkpoint holds both. So each sample is, once per epoch, in exactly one step of the job's
final weights.

A batch never extends over the end of an epoch. The last batch of an epoch holds the remainder, and its
weights are computed from its actual size: each step is the mean over its samples. The job has ended at the
position after the last batch of the last epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Optional

from torchft.data.cut import bounds
from torchft.data.permutation import Permutation

_FORMAT = 1  # of a saved position; another permutation of the same plan needs another format
_MOST = 2**63 - 1  # positions are sent as 64-bit numbers


class PositionDiffers(ValueError):
    """A saved position, or that of a peer, does not belong to this plan."""


class SamplesDiffer(RuntimeError):
    """A reduction contains more or fewer samples than the batch: the step must not be committed."""


@dataclass(frozen=True, order=True)
class DataPosition:
    """The position of a job in its data. It belongs to the weights that contain all batches before it.

    Attributes:
        epoch: epoch of the next step, from 0.
        batch: batch of the next step within the epoch, from 0; equal to the number of committed batches of
            the epoch.
    """

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class PlannedUnit:
    """The samples of one backward pass.

    Attributes:
        indices: indices into the dataset; never empty.
        weight: factor for the mean loss over ``indices``: the number of its samples divided by that of the
            batch; 0 if another rank counts them. The weights of a batch, over all ranks and groups, add up to
            1, because gradients are added.
        last: whether it is the last unit of this rank in this step.
        number: index of the unit in its batch, from 0.
    """

    indices: Sequence[int]
    weight: float
    last: bool
    number: int = field(default=0, compare=False)


@dataclass(frozen=True)
class RankShare:
    """The part of one rank in one step.

    Attributes:
        position: position of the step.
        units: the units, at least one. All ranks of a group have the same number.
        samples: number of this rank's samples that count, those that its group keeps among them.
        expected: number of samples in a reduction over all participants, among ranks with this ``data_rank``.
        kept: number of those of ``samples`` whose gradients this rank keeps, so that no unit has them.
    """

    position: DataPosition
    units: tuple[PlannedUnit, ...]
    samples: int
    expected: int
    kept: int = 0

    def check(self, counted: int) -> None:
        """Raises SamplesDiffer unless a reduction contains the expected number of samples.

        Args:
            counted: the sum of ``samples``, reduced together with the gradients.
        """
        if counted != self.expected:
            raise SamplesDiffer(
                f"batch {self.position.batch} of epoch {self.position.epoch}: {counted} samples were "
                f"reduced, {self.expected} belong to it; the step must not be committed"
            )


@dataclass(frozen=True)
class DataPlan:
    """The settings that determine the samples of each step. Must be equal in all groups.

    Args:
        length: number of samples in the dataset.
        global_batch_size: samples of a step, over all groups; the number of groups does not matter.
        micro_batch_size: samples of a unit; divides ``global_batch_size``.
        shuffle: whether each epoch has a new order; otherwise the dataset's own.
        seed: seed of the epochs' orders.
        epochs: number of epochs of the job.

    Raises:
        ValueError: a setting is out of range.
    """

    length: int
    global_batch_size: int
    micro_batch_size: int
    shuffle: bool = True
    seed: int = 0
    epochs: int = 1

    # What a position is of; the settings that groups compare; those without which it has other samples.
    _kind: ClassVar[str] = "position"
    compared: ClassVar[tuple[str, ...]] = (
        "length", "global_batch_size", "micro_batch_size", "shuffle", "seed", "epochs"
    )  # fmt: skip
    _same_samples: ClassVar[tuple[str, ...]] = ("length", "global_batch_size", "shuffle", "seed")

    def __post_init__(self) -> None:
        for name in ("length", "global_batch_size", "micro_batch_size", "epochs"):
            _check(name, getattr(self, name), 1)
        _check("seed", self.seed, 0)
        if not isinstance(self.shuffle, bool):
            raise ValueError(f"shuffle is {self.shuffle!r}: allowed are True and False")
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size is {self.global_batch_size}: allowed are multiples of micro_batch_size, "
                f"which is {self.micro_batch_size}"
            )

    # Positions

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.length // self.global_batch_size)

    @property
    def end(self) -> DataPosition:
        """The position after the last batch of the last epoch."""
        return DataPosition(self.epochs, 0)

    def advance(self, position: DataPosition) -> DataPosition:
        """Returns the position after a committed step."""
        self._check_inside(position)
        if position.batch + 1 < self.batches_per_epoch:
            return DataPosition(position.epoch, position.batch + 1)
        return DataPosition(position.epoch + 1, 0)

    def save(self, position: DataPosition) -> dict[str, int]:
        """The position as state, for a heal or a checkpoint, with the settings that are compared."""
        settings = {name: getattr(self, name) for name in self.compared}
        return {"format": _FORMAT, **settings, "epoch": position.epoch, "batch": position.batch}

    def digest(self, position: DataPosition) -> str:
        """64 bits in hex, by which peers compare settings and position: see :mod:`torchft.data.agreement`."""
        _, *numbers = map(int, self.save(position).values())
        text = f"torchft.data {self._kind} {_FORMAT}: {numbers}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def load(self, state: Mapping[str, int]) -> DataPosition:
        """Restores the position from a state of :meth:`save`.

        The number of groups and ``epochs`` may be others than those of the state, and ``micro_batch_size``
        if the dataset is no stream: batches are the same.

        Raises:
            PositionDiffers: it belongs to another dataset or other batches, or is after the end of this plan.
        """
        if missing := [name for name in self.save(self.end) if name not in state]:
            raise PositionDiffers(
                f"the saved position has no {', '.join(missing)}: it was not saved by a loader of this kind"
            )
        if state["format"] != _FORMAT:
            raise PositionDiffers(
                f"the saved position has format {state['format']}: this version reads {_FORMAT}"
            )
        for name in self._same_samples:
            if state[name] != getattr(self, name):
                raise PositionDiffers(
                    f"{name} is {getattr(self, name)}, and the saved position is of a run in which it was "
                    f"{state[name]}: samples would be left out or repeated; give {name}={state[name]} and "
                    "the dataset of that run, or begin without the position"
                )
        position = DataPosition(state["epoch"], state["batch"])
        if position > self.end:
            raise PositionDiffers(
                f"epochs is {self.epochs}, and the saved position is in epoch {position.epoch}, from 0"
            )
        if position != self.end:
            self._check_inside(position)
        return position

    def _check_inside(self, position: DataPosition) -> None:
        if not (0 <= position.epoch < self.epochs and 0 <= position.batch < self.batches_per_epoch):
            raise PositionDiffers(
                f"there is no batch {position.batch} in epoch {position.epoch}: there are {self.epochs} "
                f"epochs of {self.batches_per_epoch} batches, from 0"
            )

    # Units

    def batch_size(self, position: DataPosition) -> int:
        """The number of samples in the batch: the global batch size, or the rest of the epoch."""
        self._check_inside(position)
        return min(self.global_batch_size, self.length - position.batch * self.global_batch_size)

    def num_units(self, position: DataPosition) -> int:
        """The number of units in the batch. Only the last one may be smaller than ``micro_batch_size``."""
        return -(-self.batch_size(position) // self.micro_batch_size)

    def indices(self, position: DataPosition, unit: int) -> Sequence[int]:
        """The samples of one unit of a batch."""
        first = position.batch * self.global_batch_size + unit * self.micro_batch_size
        places = range(first, first + self._samples(self.batch_size(position), unit, unit + 1))
        if not self.shuffle:
            return tuple(places)
        return _shuffled(self.length, self.seed, position.epoch, places)

    def share(
        self,
        position: DataPosition,
        participating_rank: Optional[int],
        num_participants: int,
        data_rank: int = 0,
        data_world_size: int = 1,
        kept: Collection[int] = (),
        own: Collection[int] = (),
        speeds: tuple[int, ...] = (),
        skipped: Collection[int] = (),
    ) -> RankShare:
        """Computes the part of a rank at a position.

        The units are divided among the data ranks first. So data rank r of the groups reduces the same units
        in every quorum, and can check its own reduction (:meth:`RankShare.check`). The part of a data rank is
        then divided among the participants, without the units whose gradients one of them keeps from an
        earlier attempt at this step. All parts are contiguous. Their sizes differ by at most one unit, or
        follow the speeds of the groups: :func:`torchft.data.cut.bounds`.

        The ranks of a group run collectives with each other in each unit, so all get as many units as the
        rank with the most. A group that does not participate has one unit per rank. The added units have
        weight 0 and are copies of the batch's first unit that is not skipped: if the loss of a copy is not
        finite, the loss of the batch is not finite either.

        Args:
            position: position of the job in this step; for a healing group, its position after the heal.
            participating_rank: rank of the group among the participants of this step; None: it is not one,
                because it heals or is a spare.
            num_participants: number of participants.
            data_rank: number of this rank among the ranks of its group that read different data. With tensor
                or pipeline parallelism, all ranks that work on the same samples pass the same number.
            data_world_size: number of data ranks in a group; equal in all groups.
            kept: numbers of the units that participants keep; equal in all groups.
            own: those of them that this group keeps.
            speeds: of the participants, in their order; equal in all groups. Empty: they are equally fast.
            skipped: numbers of the units that no group computes; equal in all groups. Their samples count as
                if their loss was 0: the weights of the others stay.

        Raises:
            ValueError: a rank, size or speed is out of range, or all units are skipped.
            PositionDiffers: the plan has no such batch: it is at its end.
        """
        _check("data_world_size", data_world_size, 1)
        _check("data_rank", data_rank, 0, data_world_size - 1)
        left = {*kept, *skipped} if skipped else kept
        parts = self.parts(position, participating_rank, num_participants, data_world_size, left, speeds)
        part, rounds = parts[data_rank], max(1, *(len(part) for part in parts))
        size = self.batch_size(position)
        of_rank = self._of_rank(size, data_rank, data_world_size)
        samples = [self._samples(size, unit, unit + 1) for unit in part]
        weighted = [(unit, number / size) for unit, number in zip(part, samples)]
        copy = next((unit for unit in range(len(skipped) + 1) if unit not in skipped), 0)
        if copy * self.micro_batch_size >= size:
            raise ValueError(f"all units of batch {position.batch} of epoch {position.epoch} are skipped")
        weighted += [(copy, 0.0)] * (rounds - len(part))
        in_sums = sum(self._samples(size, unit, unit + 1) for unit in own if unit in of_rank)
        return RankShare(
            position,
            tuple(
                PlannedUnit(self.indices(position, unit), weight, last=number == rounds, number=unit)
                for number, (unit, weight) in enumerate(weighted, start=1)
            ),
            samples=in_sums + sum(samples),
            expected=self._samples(size, of_rank.start, of_rank.stop)
            - sum(self._samples(size, unit, unit + 1) for unit in skipped if unit in of_rank),
            kept=in_sums,
        )

    def _of_rank(self, size: int, data_rank: int, data_world_size: int) -> range:
        """The units of a data rank in a batch of this size, in all groups together."""
        units = -(-size // self.micro_batch_size)
        return range(units * data_rank // data_world_size, units * (data_rank + 1) // data_world_size)

    def parts(
        self,
        position: DataPosition,
        participating_rank: Optional[int],
        num_participants: int,
        data_world_size: int = 1,
        kept: Collection[int] = (),
        speeds: tuple[int, ...] = (),
    ) -> list[Sequence[int]]:
        """Computes the units of each data rank of a group that count: see :meth:`share`."""
        _check("num_participants", num_participants, 1)
        size = self.batch_size(position)
        slices: list[Sequence[int]] = [
            self._of_rank(size, rank, data_world_size) for rank in range(data_world_size)
        ]
        if participating_rank is None:
            return [each[:0] for each in slices]
        _check("participating_rank", participating_rank, 0, num_participants - 1)
        if speeds and (len(speeds) != num_participants or min(speeds) < 1):
            raise ValueError(f"speeds are {speeds}: allowed are {num_participants} numbers from 1, or none")
        if kept:
            slices = [[unit for unit in each if unit not in kept] for each in slices]
        return [_part(each, participating_rank, num_participants, speeds) for each in slices]

    def _samples(self, size: int, start: int, stop: int) -> int:
        """The number of samples in a range of units, without ``stop``, of a batch of this size."""
        return min(stop * self.micro_batch_size, size) - min(start * self.micro_batch_size, size)


# Cached, because a unit is requested when it is read ahead, and again in its step.
@lru_cache(maxsize=1024)
def _shuffled(length: int, seed: int, epoch: int, places: range) -> tuple[int, ...]:
    order = _order(length, seed, epoch)
    return tuple(order[place] for place in places)


@lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> Permutation:
    return Permutation(length, seed, epoch)


def _part(units: Sequence[int], rank: int, of: int, speeds: tuple[int, ...]) -> Sequence[int]:
    """Returns one of several contiguous parts, whose sizes follow the speeds, or differ by at most one."""
    if speeds:
        first, end = bounds(len(units), speeds)[rank : rank + 2]
        return units[first:end]
    return units[len(units) * rank // of : len(units) * (rank + 1) // of]


def _check(name: str, value: int, least: int, most: int = _MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        end = "2**63 - 1" if most == _MOST else most
        raise ValueError(f"{name} is {value!r}: allowed are whole numbers from {least} to {end}")
