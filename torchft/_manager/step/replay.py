"""Whether a step that failed because of a peer is replayed: its inputs are reduced again with the remaining
groups (docs/replay.md).

There are three decisions. First, each rank decides whether it can replay (:meth:`Replay.why_not`), and the
ranks of a group vote: all of them replay, or none. Second, the next quorum decides
(``Plan.why_recomputed``): only if none of its groups has committed the step do all have the weights from
which their gradients were computed. Third, the group votes on the replayed step; if it is not committed, the
decisions begin again. The Manager acts by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Optional

import torch

from torchft._manager.step.inputs import Inputs, Kept
from torchft.work import AnyReduceOp

if TYPE_CHECKING:
    from torchft._manager.rank import Position
    from torchft._manager.step.step import Step

# Each replay of a step is due to another failure. After so many in a row the network is taken to be broken:
# the step is lost, and counts for max_retries.
MOST_REPLAYS = 5


class Replay:
    """Keeps the inputs of a step's reductions, and decides whether they can be reduced again.

    Attributes:
        enabled: whether steps are replayed; if not, nothing is kept.
        copies: buffers for the inputs, reused in every step.
        hooks: repeat what the training loop does between reduction and vote.
        gradients: what optimizers will read. A step can be replayed only if it reduces all of that.
        ahead: set when a replay's quorum showed that the step cannot be replayed: that quorum serves the next
            step, which must begin at this position.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.copies: list[torch.Tensor] = []
        self.hooks: list[Callable[[], None]] = []
        self.gradients: list[Callable[[], Iterable[torch.Tensor]]] = []
        self.ahead: Optional[Position] = None

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
        assert step.plan is not None
        reason = step.plan.why_recomputed
        if reason is not None:
            step.inputs.refuse(reason)
        if local_steps:
            step.inputs.refuse(
                "with LocalSGD and DiLoCo, a group that has committed requests a quorum only after its "
                "local steps"
            )
        return step.inputs.keep(tensor, reduce_op, should_quantize)

    def why_not(self, inputs: Inputs, replays: int) -> Optional[str]:
        """Why this rank cannot reduce the inputs of a failed attempt again; None if it can.

        Args:
            inputs: those of all attempts at the step.
            replays: number of earlier replays.
        """
        if inputs.refused is not None:
            return inputs.refused
        if replays >= MOST_REPLAYS:
            return f"it was reduced again {replays} times"
        if not len(inputs):
            return "nothing was reduced in it"
        if self.hooks:
            return inputs.twice()
        gradients = [gradient for read in self.gradients for gradient in read()]
        return inputs.changed() or inputs.twice() or inputs.elsewhere(gradients)

    def begins_at(self, position: Position) -> bool:
        """The next step begins here. Whether the quorum that a replay requested is valid for it."""
        ahead, self.ahead = self.ahead, None
        return ahead == position
