"""Replays a step that failed because of a peer: reduces it again with the remaining groups (docs/replay.md).

What is decided is in replay.py, what is kept in inputs.py; this carries it out, on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Optional

import torch
from torch.distributed import ReduceOp

from torchft._manager.inputs import Inputs, Kept
from torchft._manager.replay import MOST_REPLAYS, Attempt, why_not, why_recomputed

if TYPE_CHECKING:
    from torchft._manager.errors import Errors
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.state import Position
    from torchft._manager.step import Step


class Replayer:
    """Keeps what a step reduces, and does it again if the step is not committed.

    Args:
        enabled: whether anything is kept at all.
        errors: take those of another attempt.
        logger: of the Manager.
    """

    def __init__(self, enabled: bool, errors: Errors, logger: _ManagerLogger) -> None:
        self.enabled = enabled
        self._errors = errors
        self._logger = logger
        self._copies: list[torch.Tensor] = []  # memory for the inputs of every step
        self._hooks: list[Callable[[], None]] = []
        self._gradients: list[Callable[[], Iterable[torch.Tensor]]] = []
        # The state for which the quorum of the next step is known already: a replay asked for it, and was none.
        self._ahead: Optional[Position] = None

    def inputs(self) -> Inputs:
        """Where a step that begins keeps what it reduces."""
        return Inputs(self._copies)

    def register_hook(self, hook: Callable[[], None]) -> None:
        """What the training loop does between the reduction and the vote."""
        self._hooks.append(hook)

    def register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        """What an optimizer will read: a replay must reach all of it."""
        self._gradients.append(gradients)

    # While a step runs

    def keep(
        self, step: Step, tensor: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool, local_steps: bool
    ) -> Optional[Kept]:
        """Copies a tensor that is about to be reduced; None if there is no use in it.

        Args:
            step: its quorum is known.
            tensor, reduce_op, should_quantize: as of ``Manager.allreduce``.
            local_steps: whether groups train by themselves between two quorums.
        """
        if not self.enabled:
            return None
        assert step.plan is not None
        reason = why_recomputed(step.plan)
        if reason is not None:
            step.inputs.refuse(reason)
        if local_steps:
            step.inputs.refuse(
                "with LocalSGD and DiLoCo, who has committed asks for a quorum only after its local steps"
            )
        return step.inputs.keep(tensor, reduce_op, should_quantize)

    # When it was not committed

    def replay(
        self,
        step: Step,
        *,
        vote: Callable[[bool], bool],
        ask: Callable[[], Step],
        reduce: Callable[[torch.Tensor, ReduceOp, bool], object],
        end: Callable[[], None],
        finish: Callable[[], bool],
        load: Callable[[], Optional[Position]],
    ) -> bool:
        """Reduces the step again until it is committed, or cannot be; whether it is committed.

        All ranks of the group replay, or none: so they vote on it.

        Args:
            step: the attempt that was lost.
            vote: whether all ranks of the group say yes.
            ask: asks for the next quorum, and waits for it; gives the attempt that is in it.
            reduce: begins to reduce a tensor.
            end: waits for all that was begun.
            finish: ends it; whether the group commits it.
            load: loads the state of a heal; gives what the group has then, None after an error.
        """
        if not self.enabled:
            return False
        for replays in range(MOST_REPLAYS + 1):
            reason = self._why_not(step.inputs, replays)
            try:
                if not vote(reason is None):
                    self._logger.warn(f"the step is not reduced again: {reason or 'another rank of the group cannot'}")
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
                # Its quorum becomes that of the next step: the others count on this group in it. The state of a heal is
                # loaded now, because between two steps the weights are those of the step.
                self._ahead = load()
                if self._ahead is None:
                    step.collectives.abort()
                return False
            self._logger.info(f"reduced again with {step.plan.participants} groups, because {why}")
            self.reduce_again(step, reduce, end)
            if finish():
                return True
        return False

    def reduce_again(
        self, step: Step, reduce: Callable[[torch.Tensor, ReduceOp, bool], object], end: Callable[[], None]
    ) -> None:
        """Reduces what the lost attempt had, in another one."""
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
                hook()  # what was reduced becomes what the optimizer reads
        except Exception as e:
            self._logger.exception(f"a replay hook failed: {e}")
            self._errors.reported(e)

    def _why_not(self, inputs: Inputs, replays: int) -> Optional[str]:
        if self._hooks:
            changed = inputs.twice()
        else:
            gradients = [gradient for read in self._gradients for gradient in read()]
            changed = inputs.changed() or inputs.twice() or inputs.elsewhere(gradients)
        return why_not(Attempt(replays=replays, kept=len(inputs), refused=inputs.refused, changed=changed))

    # When the next step begins

    @property
    def is_ahead(self) -> bool:
        """Whether the group is in the quorum of the next step already."""
        return self._ahead is not None

    def arrives(self, position: Position) -> bool:
        """The next step begins with this state: whether it is the one for which the quorum was asked for."""
        ahead, self._ahead = self._ahead, None
        return ahead == position
