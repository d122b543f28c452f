"""The items of an ElasticDataLoader: an optimizer step, and the units that this rank computes in it.

A step is correct only if the gradients of all its units are in the reduction. So each unit records its
:meth:`Unit.accumulate`, and :meth:`LoaderStep.check` is called before gradients are reduced and before the
group votes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch

from torchft.data.position import PlannedUnit, RankShare

if TYPE_CHECKING:
    from torchft.data.loader import ElasticDataLoader

_SHOWN = 4  # indices of a unit shown in an error
AUDIT = -1  # the place of a unit that another group counts


class UnitsSkipped(ValueError):
    """The gradients lack units of the step, which is not committed: their samples would be lost."""


class StepEnded(RuntimeError):
    """Units were used outside of their step: in another step, another quorum, or a second iteration."""


class Membership(NamedTuple):
    """The ranks among which a batch is divided, and the speeds by which it is; empty: equal ones."""

    rank: Optional[int]
    participants: int
    speeds: tuple[int, ...] = ()


class AuditedUnit(NamedTuple):
    """The unit that all participants compute in a step (torchft/_manager/checks/audit.py).

    Attributes:
        place: its place among the units of the participant that counts it.
        unit: the unit.
        own: whether this group counts it.
    """

    place: int
    unit: PlannedUnit
    own: bool


class Unit:
    """A micro-batch of one rank.

    Attributes:
        data: the samples, as the collate function returned them.
        indices: indices of the samples in the dataset.
        weight: factor for the mean loss of the samples; 0 if this group heals or is a spare, or if another
            rank counts them.
        last: whether this is the unit in which gradients are reduced.
        repeated: whether this is a further pass of the step, because gradients did not fit
            (``reproducible_reduction``).
        audit: whether another group counts this unit, and its gradient is only compared (``audit``).
    """

    def __init__(self, step: LoaderStep, place: int, data: Any, weight: float, seed: Optional[int]) -> None:
        planned = step.planned(place)
        self.audit = place == AUDIT
        exact = None if self.audit else step._loader._exact
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
        """Surrounds the forward and backward pass: gradients are accumulated, and reduced only with the last
        unit of the step.

        Every unit of a step must be accumulated, including units of weight 0.

        Args:
            models: the models used in the passes: wrapped by DistributedDataParallel (of torchft or PyTorch),
                made FSDP2 modules by ``fully_shard``, or plain ones, which reduce nothing by themselves. With
                ``reproducible_reduction``, all models whose gradients the optimizer reads: after the last
                unit their gradients are those of the batch, and nothing else has to be reduced.

        Raises:
            StepEnded: the step of this unit has ended.
            ValueError: with ``reproducible_reduction``: the models differ from the last call's, or cannot be
                summed.
        """
        self._step.check_runs()
        if self._seed is not None:
            torch.manual_seed(self._seed)
        audits, audited = self._step._loader._audits, self._step.audited
        new = audits is not None and audits.check(models)
        # noted before the passes, because the last unit reduces in its backward pass
        if not self.audit:
            self._step._added.add(self._place)
        try:
            with contextlib.ExitStack() as stack:
                own = audited is not None and audited.own and self._place == audited.place
                if audits is not None and (own or self.audit):
                    stack.enter_context(audits.measured(models, self.indices, discard=self.audit))
                elif audits is not None and new:
                    stack.enter_context(audits.unchanged(models))
                if self._exact is not None:
                    stack.enter_context(
                        self._exact.accumulate(models, counted=self.weight != 0, last=self.last)
                    )
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


class LoaderStep:
    """The work of one rank in one optimizer step: iterate once over its units.

    With ``reproducible_reduction`` the iteration may yield all units a second time (``unit.repeated``); their
    gradients are then computed from scratch.

    Attributes:
        position: position of the step: epoch, and batch of that epoch.
        participants: groups whose gradients count.
        again: number of earlier attempts at this step, of which this group keeps the gradients; its units are
            then those of failed groups only, or one with weight 0.
        committed: whether the step was committed; None before ``optimizer.step()``, and with LocalSGD and
            DiLoCo. If it is False, the weights may be those of a heal that has not ended: do not save them.
    """

    committed: Optional[bool] = None

    def __init__(
        self,
        loader: ElasticDataLoader,
        share: RankShare,
        membership: Membership,
        again: int = 0,
        audited: Optional[AuditedUnit] = None,
    ) -> None:
        self._loader = loader
        self._share = share
        self._membership = membership
        self._attempt = loader._manager._current  # the Manager's attempt, whose quorum determines the units
        self._iterated = False
        self._added: set[int] = set()  # the places of the accumulated units
        self.audited = audited
        # Of a stream, see StreamPlan.count: what this rank has read, and what the ranks of its group have.
        self.counted = self.total = 0
        self.position = share.position
        self.participants = membership.participants
        self.again = again

    def __len__(self) -> int:
        return len(self._share.units)

    def __iter__(self) -> Iterator[Unit]:
        """Yields the units of the step.

        Raises:
            StepEnded: it was iterated before, or has ended.
            ReadFailed: one of them could not be read.
        """
        if self._iterated:
            raise StepEnded(
                f"{self._name} is iterated a second time: its units are read once; keep those that are "
                "needed again, as in `units = list(step)`"
            )
        self._iterated = True
        return self._units()

    def _units(self) -> Iterator[Unit]:
        exact = self._loader._exact
        places = [AUDIT] if self.audited is not None and not self.audited.own else []
        places += range(len(self))
        while True:
            for place in places:
                self.check_runs()
                # for the report of an exception, which ends this rank
                unit = self.planned(place)
                self._attempt.unit = unit.indices
                self._attempt.skip = self._loader._left_out.name(self.position, unit.number)
                yield self._loader._read(self, place)
                if exact is not None:
                    self._check_first(place + 1)
            if exact is None or not exact.repeats():
                self._attempt.unit, self._attempt.skip = None, ""  # an exception after them is of no unit
                return
            self._added.clear()
            places = list(range(len(self)))
            self._loader._expect(self._membership, self._share)

    @property
    def _name(self) -> str:
        return f"the step of batch {self.position.batch} of epoch {self.position.epoch}"

    def check_runs(self) -> None:
        """Raises StepEnded unless the units of this step can still be reduced."""
        loader = self._loader
        other_quorum = loader._local_steps is None and loader._manager._current is not self._attempt
        if other_quorum or loader._step is not self:
            how = "been left for another quorum" if other_quorum else "ended"
            raise StepEnded(
                f"{self._name} has {how}: its units may be those of other groups now; compute them before "
                "optimizer.step(), and before the loader gives another step"
            )

    def _check_first(self, units: int) -> None:
        """Checks the units before the last one is reduced: a later one would miss the reduction."""
        try:
            self.check(units)
        except UnitsSkipped as e:
            self._loader._manager._report_own_error(e)  # the other groups must not wait for this rank's part
            raise

    @property
    def failed(self) -> bool:
        """Whether the step has failed, as far as it is known; False with LocalSGD and DiLoCo."""
        return self._loader._local_steps is None and self._attempt.error is not None

    @property
    def samples(self) -> int:
        """The number of this rank's samples in accumulated units that count, and in kept gradients."""
        units = (self._share.units[place] for place in self._added)
        return self._share.kept + sum(len(unit.indices) for unit in units if unit.weight)

    def planned(self, place: int) -> PlannedUnit:
        """The unit at a place among those of this rank, or at :data:`AUDIT`."""
        if place != AUDIT:
            return self._share.units[place]
        assert self.audited is not None
        return self.audited.unit

    def put(self, place: int, unit: PlannedUnit, counted: int) -> None:
        """Replaces a planned unit by what was read of a stream, and counts it."""
        units = self._share.units
        self._share = replace(self._share, units=(*units[:place], unit, *units[place + 1 :]))
        self.counted += counted

    def check(self, units: Optional[int] = None) -> None:
        """Raises UnitsSkipped unless accumulate() was called for the first units; default: for all."""
        skipped = [
            place for place in range(len(self) if units is None else units) if place not in self._added
        ]
        if not skipped:
            return
        unit = self._share.units[skipped[0]]
        some = ", ".join(map(str, unit.indices[:_SHOWN])) + (", …" if len(unit.indices) > _SHOWN else "")
        more = f", and {len(skipped) - 1} more of this rank," if len(skipped) > 1 else ""
        raise UnitsSkipped(
            f"unit {unit.number} of batch {self.position.batch} of epoch {self.position.epoch} (samples "
            f"{some}){more} did not go through accumulate(): the step is not committed, as the weights "
            "would lack those samples. Each unit of a step belongs into `with unit.accumulate(model)` "
            "before gradients are reduced. If one must not count, multiply its loss by 0"
        )
