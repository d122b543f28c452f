"""Keeps the gradients of a loader's step that is not committed, so that groups compute only what is missing
when the step comes again (docs/replay.md).

A rank keeps a copy of each tensor that it reduces, made before the reduction. In the next attempt it adds the
copies to the tensors of the same places, before these are reduced. Which units groups keep, and which of them
count in a quorum, is decided in torchft/data/kept.py; this module acts, on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Optional

import torch
from torch.distributed import ReduceOp

from torchft._agreement import KEEPS, announced
from torchft.data.kept import KeptUnits, counting
from torchft.work import AnyReduceOp

if TYPE_CHECKING:
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.step.inputs import Inputs
    from torchft._manager.step.step import Step
    from torchft.data.position import DataPosition


class Again:
    """The gradients that this rank keeps from one attempt at a loader's step to the next.

    Args:
        enabled: whether any are kept. What other groups keep counts in any case.

    Attributes:
        units: the units of this group whose gradients its ranks keep, all ranks together; empty: none.
        attempts: number of earlier attempts at the step whose gradients are kept.
    """

    def __init__(self, enabled: bool, logger: _ManagerLogger) -> None:
        self.enabled = enabled
        self._logger = logger
        self.forget()

    def forget(self) -> None:
        """Forgets what is kept: the step comes again as a whole, or was committed."""
        self.units: frozenset[int] = frozenset()
        self.attempts = 0
        self._tensors = 0  # number of tensors that are kept
        self._weights = (0, 0)  # step and quorum of the weights of which they are gradients
        self._position: Optional[DataPosition] = None
        self._computes: frozenset[int] = frozenset()  # the units of this group in the attempt in progress

    # When an attempt begins

    def announces(self, left: Step, step: int, committed_quorum_id: int) -> str:
        """The announcement of this group in the request for its next quorum.

        Args:
            left: the attempt before. If it was left without a vote, its gradients may be in the copies of
                this rank, and not in those of another rank of the group.
            step: the Manager's step.
            committed_quorum_id: of this group's weights.
        """
        if (left.undecided and len(left.inputs)) or self._weights != (step, committed_quorum_id):
            self.forget()
        if not self.units:
            return ""
        assert self._position is not None
        return KeptUnits(step, committed_quorum_id, self._position, self.units).text

    def begin(self, step: Step, plan: Plan, position: DataPosition) -> frozenset[int]:
        """Begins an attempt in a quorum. Returns the units that all its groups keep. RuntimeError: the other
        groups take this group to keep units that it does not: the step must not be committed.
        """
        kept = counting(
            [announced(handle, KEEPS) for handle in plan.handles],
            step=plan.max_step,
            committed_quorum_id=plan.committed_quorum_id,
            position=position,
        )
        own = kept[plan.replica_rank] if plan.replica_rank < len(kept) else frozenset()
        if self.units and own != self.units:
            self._logger.warn("the whole step is computed again: the kept gradients are of other weights")
            self.forget()
        if own:
            if own != self.units:
                raise RuntimeError("this group has announced gradients that it does not keep any more")
            if len(step.inputs):
                step.inputs.refuse("the loop began the step again after a reduction")
            step.inputs.before = self._tensors
        return frozenset().union(*kept)

    def computes(self, position: DataPosition, units: Iterable[int]) -> None:
        """Notes the units of this group, all its ranks together, in the attempt that begins."""
        self._position, self._computes = position, frozenset(units)

    # While it runs

    def keep(self, step: Step, tensor: torch.Tensor, reduce_op: AnyReduceOp, should_quantize: bool) -> None:
        """Adds what is kept to a tensor that is about to be reduced, and keeps the sum. ValueError: the
        tensors of this attempt are not those of the one before.
        """
        if step.participating_rank is None or step.healing:
            step.inputs.refuse("this group did not take part")  # and has kept nothing
            return
        if step.inputs.before:
            step.inputs.add(tensor)
        if not self.enabled:
            return
        if not (reduce_op == ReduceOp.SUM or reduce_op == ReduceOp.AVG):
            step.inputs.refuse(f"a tensor was reduced with {reduce_op}, so that attempts do not add up")
        step.inputs.keep(tensor, reduce_op, should_quantize)

    # When it has ended

    def verify(self, step: Step) -> None:
        """Raises an error if this rank has not added all that it keeps: the step must not be committed."""
        inputs = step.inputs
        if inputs.added != inputs.before:
            step.collectives.abort()  # other groups may wait for a tensor that this rank did not reduce
            raise RuntimeError(_differ(inputs))

    def retain(
        self, step: Step, at: tuple[int, int], check: Callable[[], None], vote: Callable[[bool], bool]
    ) -> Optional[int]:
        """Keeps the gradients of an attempt that was not committed, if all ranks of the group can. Returns
        the number of units of the group that need not be computed again; None if nothing is kept.

        Args:
            step: the attempt.
            at: the Manager's step, and the quorum in which this group's weights were committed.
            check: raises an error if this rank has not reduced all gradients.
            vote: votes for this rank; returns whether all ranks of the group voted yes.

        Raises:
            Exception: that of the vote.
        """
        if not self.enabled or at[0] == 0 or step.plan is None or step.plan.heal:
            # All ranks of the group come here. In the first step of a job they may heal from different
            # groups (init_sync).
            self.forget()
            return None
        reason = self._why_not(step, check)
        try:
            yes = vote(reason is None)
        except BaseException:
            # It is raised: other ranks of the group may have got the result, and announce what they keep.
            self.forget()
            raise
        if not yes:
            self._logger.warn(
                f"nothing of the step is kept: {reason or 'another rank of the group cannot keep it'}"
            )
            self.forget()
            return None
        self.units, self._computes = self.units | self._computes, frozenset()
        self._tensors, self._weights = len(step.inputs), at
        self.attempts += 1
        return len(self.units)

    def _why_not(self, step: Step, check: Callable[[], None]) -> Optional[str]:
        inputs = step.inputs
        if inputs.refused is not None:
            return inputs.refused
        if not inputs or not self.units | self._computes:
            return "nothing was reduced in it"
        if inputs.added != inputs.before:
            return _differ(inputs)
        try:
            check()
        except Exception as e:
            return str(e)
        return inputs.twice()


def _differ(inputs: Inputs) -> str:
    return f"it reduced {inputs.added} tensors, and {inputs.before} in the attempt before"
