"""The gradients of a step as exact sums: the loader's part of ``Manager(reproducible_reduction=True)``.

:mod:`torchft.data.exact_sum` has the arithmetic; the Manager reduces between groups. A *pass* computes all
units of a step. It ends with the reduction, whose result is the same on all ranks of all groups, and shows
whether the scaled gradients fit into integers. If not, all ranks make another pass over the same units, with
scales that fit.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.distributed as dist

from torchft.data._sharded_sum import ShardedGradients
from torchft.data.exact_sum import FINEST, ExactSum, ScalesDiffer
from torchft.data.position import SamplesDiffer

if TYPE_CHECKING:
    from torchft.manager import Manager

# A step repeats its pass when the scales are new or the gradients have changed much. One repetition is enough
# if the units have the same gradients in both passes.
_MOST_PASSES = 4

_ACCUMULATE = "each unit of a step belongs into `with unit.accumulate(model)`, with the same models"


class PassOutcome(IntEnum):
    """The result of a pass. The result of a group is the largest value among its ranks."""

    DONE = 0  # the parameters have their gradients
    REPEAT = 1
    FAILED = 2  # there is no sum, and the step is not committed


class PassFailed(RuntimeError):
    """The sum of a step is missing or invalid: the step is not committed."""


class ReproducibleSum:
    """The exact sums of one rank, and their scales, which continue from step to step.

    Args:
        max_units: number of units of the largest batch.
        group: process group of the ranks of this replica group; None if it has a single rank.

    Attributes:
        passes: number of passes of the step that have ended.
    """

    def __init__(self, manager: Manager, max_units: int, group: Optional[dist.ProcessGroup]) -> None:
        self._manager = manager
        self._max_units = max_units
        self._group = group
        self._total: Optional[ExactSum] = None  # None until the models are known
        self._models: tuple[Any, ...] = ()
        self._sharded: Optional[ShardedGradients] = None
        # Scales that were loaded before the models were known.
        self._saved: Optional[Mapping[str, Any]] = None
        self._new: Optional[Mapping[str, Any]] = None  # the scales of a new sum
        self.begin_step()

    # State

    def state_dict(self) -> Optional[Mapping[str, Any]]:
        """The scales with which the next step begins; None before the first step."""
        return self._saved if self._total is None else self._total.state_dict()

    def load_state_dict(self, state: Optional[Mapping[str, Any]]) -> None:
        """Takes over the scales of a peer or a checkpoint. ValueError: they belong to another model."""
        self._saved = state
        if self._total is not None:
            assert self._new is not None
            self._total.load_state_dict(self._new if state is None else state)

    @property
    def digest(self) -> str:
        """A digest of the scales. It does not include scales that no step has changed, so it is the same in
        all groups before the first step.
        """
        exponents = (self.state_dict() or {}).get("exponents", {})
        text = repr(sorted((name, exponent) for name, exponent in exponents.items() if exponent != FINEST))
        return hashlib.sha256(text.encode()).hexdigest()

    # A step

    def begin_step(self) -> None:
        """Begins a step with the scales of the last committed one."""
        if self._total is not None:
            self._total.abandon()
        self._outcome: Optional[PassOutcome] = None
        self._error: Optional[Exception] = None
        self.passes = 0
        self._added = 0  # number of units added in this pass

    @contextlib.contextmanager
    def accumulate(self, models: tuple[Any, ...], counted: bool, last: bool) -> Iterator[None]:
        """Surrounds forward and backward pass of a unit; the last one of a pass reduces everything."""
        total = self._of(models)
        if self._added == 0:
            self._outcome = None
            total.begin()
        assert self._sharded is not None
        self._sharded.begin_unit(total, counted)
        with contextlib.ExitStack() as stack:
            for model in models:
                if hasattr(model, "no_sync"):
                    stack.enter_context(model.no_sync())
            yield
        self._sharded.end_unit()
        total.add(counted)
        self._added += 1
        if last:
            self._added = 0
            self.passes += 1
            self._outcome = self._agree(self._reduce(total))

    def repeats(self) -> bool:
        """Whether another pass over the units follows: the same on all ranks with the same sum."""
        return self._outcome is PassOutcome.REPEAT

    def verify(self, units: int) -> None:
        """Raises unless the gradients are those of this many units. A heal must be loaded before."""
        if self._error is not None:
            raise self._error
        if self._outcome is not PassOutcome.DONE or self._total is None:
            raise PassFailed(f"reproducible_reduction=True: the step has no sum of gradients; {_ACCUMULATE}")
        if self._total.units != units:
            raise SamplesDiffer(f"{self._total.units} units were reduced, {units} belong to the batch")

    def commit(self) -> None:
        """Commits the step."""
        if self._total is not None and self._outcome is PassOutcome.DONE:
            self._total.commit()

    # Parts of the above

    def _of(self, models: tuple[Any, ...]) -> ExactSum:
        if self._total is None:
            self._total = self._make(models)
            self._models = models
        elif len(models) != len(self._models) or any(a is not b for a, b in zip(models, self._models)):
            raise ValueError(f"reproducible_reduction=True: accumulate() got other models; {_ACCUMULATE}")
        return self._total

    def _make(self, models: tuple[Any, ...]) -> ExactSum:
        if not models:
            raise ValueError(
                "reproducible_reduction=True: accumulate() got no model: pass the models "
                "whose gradients the optimizer reads"
            )
        parameters: list[tuple[str, torch.nn.Parameter]] = []
        for number, model in enumerate(models):
            inner = model.module if hasattr(model, "no_sync") and hasattr(model, "module") else model
            prefix = f"{number}." if len(models) > 1 else ""
            parameters += [(prefix + name, parameter) for name, parameter in inner.named_parameters()]
        ranks = 1 if self._group is None else self._group.size()
        self._sharded = ShardedGradients(models, ranks)
        total = ExactSum(parameters, self._max_units, ranks)
        self._new = total.state_dict()
        if self._saved is not None:
            total.load_state_dict(self._saved)
        return total

    def _reduce(self, total: ExactSum) -> PassOutcome:
        if self._group is not None:
            add_in_group(self._manager, self._group, total.in_group)
        if not self._manager._sum_integers(total.buffers):
            return PassOutcome.FAILED
        try:
            complete = total.read()
        except ScalesDiffer as e:  # all groups raise it, so none waits for this rank
            self._error = e
            return PassOutcome.FAILED
        if complete:
            return PassOutcome.DONE
        if self.passes < _MOST_PASSES:
            return PassOutcome.REPEAT
        self._error = PassFailed(
            f"the gradients of the same units did not fit in {_MOST_PASSES} passes: they differ from pass "
            "to pass; random numbers (reproducible_rng=True) and kernels must be deterministic"
        )
        return PassOutcome.FAILED

    def _agree(self, outcome: PassOutcome) -> PassOutcome:
        """Makes either all ranks of the group repeat the pass or none, because a pass needs all of them."""
        if self._group is None:
            return outcome
        assert self._total is not None
        worst = torch.tensor([outcome], dtype=torch.int64, device=self._total.buffers[0].device)
        add_in_group(self._manager, self._group, [worst], dist.ReduceOp.MAX)
        if worst.item() == outcome:
            return outcome
        failure = PassFailed("another rank of this group did not get the sum of the step")
        self._manager._report_own_error(failure)  # other groups may have begun the next pass
        return PassOutcome.FAILED


def add_in_group(
    manager: Manager, group: dist.ProcessGroup, tensors: Iterable[torch.Tensor], op: Any = dist.ReduceOp.SUM
) -> None:
    """Reduces tensors over the ranks of a replica group, in place."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    try:
        for tensor in tensors:
            group.allreduce([tensor], options).wait()
    except Exception as e:
        manager._report_own_error(e)  # other groups must not wait for this one
        raise


def group_of_ranks(
    manager: Manager, data_world_size: int, given: Optional[dist.ProcessGroup], why: str
) -> Optional[dist.ProcessGroup]:
    """The process group in which the ranks of a replica group add their integers; None if the group has a
    single rank.

    Args:
        data_world_size, given: arguments of the loader.
        why: the reason for which integers are added, in errors.

    Raises:
        ValueError: there is no process group, it has another size, or the ranks use model parallelism.
    """
    world_size = manager._settings.group_world_size
    if data_world_size != world_size:
        raise ValueError(
            f"data_world_size is {data_world_size}, and the group has {world_size} ranks: with {why} all "
            "ranks of a group read different data"
        )
    if world_size == 1:
        return None
    group = given
    if group is None and dist.is_initialized() and dist.group.WORLD is not manager._pg:
        group = dist.group.WORLD
    if group is None or group.size() != world_size:
        size = "there is none" if group is None else f"this one has {group.size()}"
        raise ValueError(
            f"{why} needs a process group of the {world_size} ranks of the group, and {size}: "
            "call init_process_group before, or give ElasticDataLoader data_group"
        )
    return group
