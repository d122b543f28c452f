"""Reduces a step that lost a peer again, with the groups that are left: docs/replay.md. Off, it does nothing.

What is decided is in replay.py, what is kept in inputs.py; this carries it out, on the training thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Callable, Optional, Protocol

import torch
from torch.distributed import ReduceOp

from torchft._manager.inputs import Inputs, Kept
from torchft._manager.replay import MOST_REPLAYS, Attempt, why_anew, why_not

if TYPE_CHECKING:
    from torchft._manager.errors import ExceptionWithTraceback
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.plan import Plan
    from torchft._manager.state import Position
    from torchft._manager.work import _ManagedWork


class _Steps(Protocol):
    """What the Manager does in a step, which a replay does again."""

    _layout: Optional[list[str]]
    _logger: _ManagerLogger
    _plan: Optional[Plan]

    @property
    def _position(self) -> Position: ...
    def _reduce(self, tensor: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool) -> Optional[_ManagedWork]: ...
    def _report_collective_error(self, e: Exception) -> None: ...
    def _end_collectives(self) -> None: ...
    def _abort_collectives(self) -> None: ...
    def _vote(self, yes: bool, timeout: timedelta) -> bool: ...
    def _why_lost(self) -> str: ...
    def _ask_again(self) -> Plan: ...
    def _try_step(self, timeout: timedelta) -> bool: ...
    def _finish_heal(self) -> None: ...
    def errored(self) -> Optional[ExceptionWithTraceback]: ...
    def report_error(self, e: Exception) -> None: ...


class Replayer:
    """Keeps what a step reduces, and does it again if the step is not committed.

    Args:
        manager: whose steps these are.
        enabled: whether anything is kept at all.
    """

    def __init__(self, manager: _Steps, enabled: bool) -> None:
        self.enabled = enabled
        self._manager = manager
        self._inputs = Inputs()  # of this step's allreduces
        self._hooks: list[Callable[[], None]] = []
        self._gradients: list[Callable[[], Iterable[torch.Tensor]]] = []
        # The state for which the quorum of the next step is known already: a replay asked for it, and was none.
        self._ahead: Optional[Position] = None

    def register_hook(self, hook: Callable[[], None]) -> None:
        """What the training loop does between the reduction and the vote."""
        self._hooks.append(hook)

    def register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        """What an optimizer will read: a replay must reach all of it."""
        self._gradients.append(gradients)

    # While a step runs

    def begin(self) -> None:
        """A step begins, or has ended."""
        if self.enabled:
            self._inputs.begin()

    def refuse(self, reason: str) -> None:
        """This step does something that cannot be done again."""
        self._inputs.refuse(reason)

    def keep(self, tensor: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool) -> Optional[Kept]:
        """Copies a tensor that is about to be reduced; None if there is no use in it. The quorum is known."""
        if not self.enabled:
            return None
        assert self._manager._plan is not None
        reason = why_anew(self._manager._plan)
        if reason is not None:
            self._inputs.refuse(reason)
        if self._manager._layout is not None:
            self._inputs.refuse(
                "with LocalSGD and DiLoCo, who has committed asks for a quorum only after its local steps"
            )
        return self._inputs.keep(tensor, reduce_op, should_quantize)

    # When it was not committed

    def replay(self, timeout: timedelta) -> bool:
        """Reduces the step again until it is committed, or cannot be; whether it is committed.

        All ranks of the group replay, or none: so they vote on it.
        """
        if not self.enabled:
            return False
        manager = self._manager
        for replays in range(MOST_REPLAYS + 1):
            reason = self._why_not(replays)
            try:
                if not manager._vote(reason is None, timeout):
                    manager._logger.warn(
                        f"the step is not reduced again: {reason or 'another rank of the group cannot'}"
                    )
                    return False
                why = manager._why_lost()
                plan = manager._ask_again()
            except Exception as e:
                manager._logger.exception(f"the step is not reduced again: {e}")
                return False
            reason = why_anew(plan)
            if reason is not None:
                manager._logger.warn(f"the step is not reduced again: {reason}")
                self._leave_quorum_to_next_step()
                return False
            manager._logger.info(f"reduced again with {plan.participants} groups, because {why}")
            self._reduce_again()
            if manager._try_step(timeout):
                return True
        return False

    def _why_not(self, replays: int) -> Optional[str]:
        inputs = self._inputs
        if self._hooks:
            changed = inputs.twice()
        else:
            gradients = [gradient for read in self._gradients for gradient in read()]
            changed = inputs.changed() or inputs.twice() or inputs.elsewhere(gradients)
        return why_not(Attempt(replays=replays, kept=len(inputs), refused=inputs.refused, changed=changed))

    def _reduce_again(self) -> None:
        manager = self._manager
        try:
            for kept in self._inputs.restore():
                manager._reduce(kept.tensor, kept.reduce_op, kept.should_quantize)
        except Exception as e:
            manager._report_collective_error(e)
        manager._end_collectives()
        self._inputs.settle()
        if manager.errored() is not None:
            return
        try:
            for hook in self._hooks:
                hook()
        except Exception as e:
            manager._logger.exception(f"a replay hook failed: {e}")
            manager.report_error(e)

    def _leave_quorum_to_next_step(self) -> None:
        """The quorum of a replay that is none becomes that of the next step: the others count on this group in it.

        The state of a heal is loaded now. Between two steps the weights are those of the step.
        """
        self._manager._finish_heal()
        if self._manager.errored() is None:
            self._ahead = self._manager._position
        else:
            self._manager._abort_collectives()

    @property
    def is_ahead(self) -> bool:
        """Whether the group is in the quorum of the next step already."""
        return self._ahead is not None

    def quorum_is_known(self, same_request: bool) -> bool:
        """Whether the step that begins has its quorum from the replay of the one before, which was none.

        Args:
            same_request: whether this step asks for what that one asked for.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return False
        if same_request and ahead == self._manager._position:
            return True
        self._manager._abort_collectives()  # the others count on this group in the quorum that it leaves
        return False
