"""The items of an ElasticDataLoader: an optimizer step, and the units that this rank computes in it.

A step is right only if the gradients of all its units are in the reduction. So each unit notes that it went through
:meth:`Unit.accumulate`, and :meth:`Step.check` is asked before gradients are reduced, and before the group votes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch

from torchft.data.position import Share

if TYPE_CHECKING:
    from torchft.data.loader import ElasticDataLoader

_SHOWN = 4  # indices of a unit in an error


class UnitsSkipped(ValueError):
    """Units of a step are not in its gradients: the step is not committed, since their samples would be lost."""


class StepEnded(RuntimeError):
    """Units are used outside of their step: in another one, in another quorum, or in a second iteration."""


class Membership(NamedTuple):
    """The ranks that divide a batch."""

    rank: Optional[int]
    participants: int


class Unit:
    """A micro-batch of one rank.

    Attributes:
        data: what the collate function made of the samples.
        indices: of the samples, in the dataset.
        weight: by which the mean loss of the samples is multiplied; 0 if this group heals or is a spare, or if another
            rank counts them.
        last: whether gradients are reduced with this one.
        repeated: whether it came before in this step, with gradients that did not fit: ``reproducible_reduction``.
    """

    def __init__(self, step: Step, place: int, data: Any, weight: float, seed: Optional[int]) -> None:
        planned = step._share.units[place]
        exact = step._loader._exact
        self.data = data
        self.indices = planned.indices
        self.weight = weight
        self.last = planned.last
        self.repeated = exact is not None and exact.passes > 0
        self._step = step
        self._place = place
        self._seed = seed
        self._exact = exact

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Around forward and backward pass: gradients are added up, and reduced with the last unit of the step only.

        Every unit of a step goes through it, those of weight 0 too, with whatever models.

        Args:
            models: those that the passes go through: wrapped by DistributedDataParallel (of torchft or PyTorch), made
                FSDP2 modules by ``fully_shard``, or plain ones, which reduce nothing by themselves. With
                ``reproducible_reduction`` all whose gradients the optimizer reads, plain or DistributedDataParallel:
                after the last unit their gradients are those of the batch, and nothing else has to be reduced.

        Raises:
            StepEnded: the step of this unit has ended.
            ValueError: with ``reproducible_reduction``: other models than before, or such that it cannot sum.
        """
        self._step.check_runs()
        if self._seed is not None:
            torch.manual_seed(self._seed)
        self._step._added.add(self._place)  # before the passes: the last unit reduces in them
        try:
            with contextlib.ExitStack() as stack:
                if self._exact is not None:
                    stack.enter_context(self._exact.accumulate(models, counted=self.weight != 0, last=self.last))
                else:
                    self._defer_reduction(models, stack)
                yield
        except BaseException:
            self._step._added.discard(self._place)
            raise

    def _defer_reduction(self, models: tuple[Any, ...], stack: contextlib.ExitStack) -> None:
        for model in models:
            if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
                model.set_requires_gradient_sync(self.last)
            elif not self.last and hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())


class Step:
    """The work of one rank in one optimizer step: iterate over its units, once.

    With ``reproducible_reduction`` all of them may come again (``unit.repeated``), and their gradients are then new.

    Attributes:
        position: of the step: epoch, and batch of that epoch.
        participants: groups whose gradients count.
    """

    def __init__(self, loader: ElasticDataLoader, share: Share, membership: Membership) -> None:
        self._loader = loader
        self._share = share
        self._membership = membership
        self._attempt = loader._manager._current  # the Manager's: its quorum cut the units
        self._iterated = False
        self._added: set[int] = set()  # places of the units that went through accumulate, or are in it
        self.position = share.position
        self.participants = membership.participants

    def __len__(self) -> int:
        return len(self._share.units)

    def __iter__(self) -> Iterator[Unit]:
        """Gives its units.

        Raises:
            StepEnded: it was iterated before, or has ended.
            ReadFailed: one of them could not be read.
        """
        if self._iterated:
            raise StepEnded(
                f"{self._name} is iterated a second time: its units are read once; keep those that are needed again, "
                "as in `units = list(step)`"
            )
        self._iterated = True
        return self._units()

    def _units(self) -> Iterator[Unit]:
        exact = self._loader._exact
        while True:
            for place in range(len(self)):
                self.check_runs()
                yield self._loader._read(self, place)
                if exact is not None:
                    self._check_first(place + 1)
            if exact is None or not exact.repeats():
                return
            self._added.clear()
            self._loader._expect(self._membership, self._share)

    @property
    def _name(self) -> str:
        return f"the step of batch {self.position.batch} of epoch {self.position.epoch}"

    def check_runs(self) -> None:
        """Raises StepEnded unless its units can still be reduced."""
        loader = self._loader
        other_quorum = loader._local_steps is None and loader._manager._current is not self._attempt
        if other_quorum or loader._step is not self:
            how = "been left for another quorum" if other_quorum else "ended"
            raise StepEnded(
                f"{self._name} has {how}: its units may be those of other groups now; compute them before "
                "optimizer.step(), and before the loader gives another step"
            )

    def _check_first(self, units: int) -> None:
        """Whether there is another pass is known when the last unit has been reduced: none may come later."""
        try:
            self.check(units)
        except UnitsSkipped as e:
            self._loader._manager._report_own_error(e)  # the others must not wait for this rank's part
            raise

    @property
    def begun(self) -> bool:
        """Whether a unit of it has been accumulated."""
        return bool(self._added)

    @property
    def samples(self) -> int:
        """Of this rank, those of units that have been accumulated, and count."""
        units = (self._share.units[place] for place in self._added)
        return sum(len(unit.indices) for unit in units if unit.weight)

    @property
    def planned_samples(self) -> int:
        """Of this rank, if none of its units is left out."""
        return self._share.samples

    @property
    def expected(self) -> int:
        """Samples of this data rank, over all groups."""
        return self._share.expected

    def check(self, units: Optional[int] = None) -> None:
        """Raises UnitsSkipped unless its first units have been accumulated, or are being; default: all."""
        skipped = [place for place in range(len(self) if units is None else units) if place not in self._added]
        if not skipped:
            return
        unit = self._share.units[skipped[0]]
        some = ", ".join(map(str, unit.indices[:_SHOWN])) + (", …" if len(unit.indices) > _SHOWN else "")
        more = f", and {len(skipped) - 1} more of this rank," if len(skipped) > 1 else ""
        raise UnitsSkipped(
            f"unit {unit.number} of batch {self.position.batch} of epoch {self.position.epoch} (samples {some}){more} "
            "did not go through accumulate(): the step is not committed, as the weights would lack those samples. Each "
            "unit of a step belongs into `with unit.accumulate(model)` before gradients are reduced. If one must "
            "not count, multiply its loss by 0"
        )
