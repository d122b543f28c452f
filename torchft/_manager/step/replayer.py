"""Replays a step that failed because of a peer: reduces its inputs again with the remaining groups
(docs/replay.md).

The decisions are in replay.py, the copies of the inputs in inputs.py. This module acts, on the training
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Optional

import torch

from torchft._manager.step.inputs import Inputs, Kept
from torchft._manager.step.replay import MOST_REPLAYS, Attempt, why_not, why_recomputed
from torchft.work import AnyReduceOp

if TYPE_CHECKING:
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.rank import Position
    from torchft._manager.step.errors import Errors
    from torchft._manager.step.step import Step


class Replayer:
    """Keeps the inputs of a step's reductions, and reduces them again if the step is not committed.

    Args:
        enabled: whether steps are replayed; if not, nothing is kept.
        errors: gets the errors of the further attempts.

    Attributes:
        copies: buffers for the inputs, reused in every step.
        ahead: set when a replay's quorum showed that the step cannot be replayed: that quorum serves the next
            step, which must begin at this position.
    """

    def __init__(self, enabled: bool, errors: Errors, logger: _ManagerLogger) -> None:
        self.enabled = enabled
        self._errors = errors
        self._logger = logger
        self.copies: list[torch.Tensor] = []
        self._hooks: list[Callable[[], None]] = []
        self._gradients: list[Callable[[], Iterable[torch.Tensor]]] = []
        self.ahead: Optional[Position] = None

    def register_hook(self, hook: Callable[[], None]) -> None:
        """Registers what the training loop does between reduction and vote, for a replay to repeat."""
        self._hooks.append(hook)

    def register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Registers what an optimizer will read. A step can be replayed only if it reduces all of that."""
        self._gradients.append(gradients)

    # While a step runs

    def keep(
        self,
        step: Step,
        tensor: torch.Tensor,
        reduce_op: AnyReduceOp,
        should_quantize: bool,
        local_steps: bool,
    ) -> Optional[Kept]:
        """Copies a tensor that is about to be reduced. Returns None if the step cannot be replayed anyway.

        Args:
            step: the attempt in progress, whose quorum is known.
            tensor, reduce_op, should_quantize: as in ``Manager.allreduce``.
            local_steps: whether groups train on their own between two quorums.
        """
        if not self.enabled:
            return None
        assert step.plan is not None
        reason = why_recomputed(step.plan)
        if reason is not None:
            step.inputs.refuse(reason)
        if local_steps:
            step.inputs.refuse(
                "with LocalSGD and DiLoCo, a group that has committed requests a quorum only after its "
                "local steps"
            )
        return step.inputs.keep(tensor, reduce_op, should_quantize)

    # After a step that was not committed

    def replay(
        self,
        step: Step,
        *,
        vote: Callable[[bool], bool],
        ask: Callable[[], Step],
        reduce: Callable[[torch.Tensor, AnyReduceOp, bool], object],
        end: Callable[[], None],
        finish: Callable[[], bool],
        load: Callable[[], Optional[Position]],
    ) -> bool:
        """Replays the step until it is committed or cannot be replayed. Returns whether it is committed.

        The ranks of a group vote before each replay, because either all of them replay or none.

        Args:
            step: the attempt that was not committed.
            vote: votes for this rank; returns whether all ranks of the group voted yes.
            ask: requests the next quorum, waits for it, and returns the attempt that belongs to it.
            reduce: begins to reduce a tensor.
            end: waits for all reductions that were begun.
            finish: ends the attempt; returns whether the group commits it.
            load: loads the state of a heal, if any; returns the group's position then, None after an error.
        """
        if not self.enabled or (step.plan is not None and step.plan.heal and step.plan.max_step > 0):
            # All ranks of a group that heals return here. It reduces its zeros in its next step, in the
            # quorum in which the other groups replay. At step 0 its ranks may not all heal, so they vote.
            return False
        for replays in range(MOST_REPLAYS + 1):
            reason = self._why_not(step.inputs, replays)
            try:
                if not vote(reason is None):
                    self._logger.warn(
                        f"the step is not reduced again: {reason or 'another rank of the group cannot'}"
                    )
                    return False
                why = step.why_lost()
                step = ask()
            except Exception as e:
                self._logger.exception(f"the step is not reduced again: {e}")
                return False
            assert step.plan is not None
            reason = why_recomputed(step.plan)
            if reason is not None:
                self._logger.warn(f"the step is not reduced again: {reason}")
                # The next step uses this quorum, because the other groups count on this one in it. The state
                # of a heal is loaded now: between two steps the group's position must be that of its weights.
                self.ahead = load()
                if self.ahead is None:
                    step.collectives.abort()
                return False
            self._logger.info(f"reduced again with {step.plan.participants} groups, because {why}")
            self.reduce_again(step, reduce, end)
            if finish():
                return True
        return False

    def reduce_again(
        self, step: Step, reduce: Callable[[torch.Tensor, AnyReduceOp, bool], object], end: Callable[[], None]
    ) -> None:
        """Reduces the inputs of the failed attempt in another attempt."""
        try:
            for kept in step.inputs.restore():
                reduce(kept.tensor, kept.reduce_op, kept.should_quantize)
        except Exception as e:
            self._errors.of_collective(e)
        end()
        step.inputs.settle()
        if step.error is not None:
            return
        try:
            for hook in self._hooks:
                hook()  # copies the reduced tensors to where the optimizer reads them, for example
        except Exception as e:
            self._logger.exception(f"a replay hook failed: {e}")
            self._errors.recurring(e, f"a replay hook failed: {e}")

    def _why_not(self, inputs: Inputs, replays: int) -> Optional[str]:
        if self._hooks:
            changed = inputs.twice()
        else:
            gradients = [gradient for read in self._gradients for gradient in read()]
            changed = inputs.changed() or inputs.twice() or inputs.elsewhere(gradients)
        return why_not(Attempt(replays=replays, kept=len(inputs), refused=inputs.refused, changed=changed))

    # When the next step begins

    def begins_at(self, position: Position) -> bool:
        """The next step begins here. Whether the quorum that a replay requested is valid for it."""
        ahead, self.ahead = self.ahead, None
        return ahead == position
