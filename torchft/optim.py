"""An optimizer that steps only if the step is committed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional

from torch.optim import Optimizer

from torchft._extras import extras_of
from torchft._unvoted import makes_state
from torchft._wrapped_optimizer import WrappedOptimizer

if TYPE_CHECKING:
    from torchft.manager import Manager


class OptimizerWrapper(WrappedOptimizer):
    """Wraps an optimizer so that each of its steps is a step of the Manager.

    ``zero_grad`` starts the quorum; ``step`` votes, and steps only if the step is committed. If several
    optimizers of a Manager begin before anything is reduced, and step after all of it, they share one step of
    the Manager: one quorum and one vote. All other methods and attributes are those of the wrapped optimizer.
    Its hooks run only for committed steps, with the wrapped optimizer as their argument. For a
    ``torch.amp.GradScaler`` both are the same optimizer.

    A copy wraps a copy of the wrapped optimizer, and has the same Manager, which neither compares nor heals
    the copy's state. A pickle holds no Manager: wrap ``optim`` of the unpickled object anew to train with it.

    The functions of ``torch.distributed.checkpoint.state_dict`` initialize the state of a new optimizer by a
    step with zero gradients and a learning rate of 0. Such a step needs no vote, since it changes no weights.

    Args:
        manager: the Manager of this rank.
        optim: the optimizer to wrap.
    """

    _of_this_process = ("manager", "_extras")
    _remedy = "wrap its attribute `optim` anew"

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        self.manager, self._extras = manager, extras_of(manager)  # before the base class: its own attributes
        super().__init__(optim)
        self._extras.register_gradients(self._gradients)
        self._extras.register_optimizer(optim)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a step: starts the quorum, then clears the gradients."""
        if not makes_state(sys._getframe(1)):
            self._extras.begin(self.optim)
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Optional[object] = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Ends a step: applies the gradients if the step is committed.

        Args:
            closure: must be None.
            kwargs: arguments of the wrapped optimizer's method.

        Returns:
            What that method returns; None if the step is not committed.

        Raises:
            AssertionError: a closure was given; it would run the model again after the groups agreed.
        """
        if closure is not None:  # not an assert statement, which python -O removes
            raise AssertionError(
                f"closure={closure!r}: step() takes none, optimizers that call a closure are not supported: "
                "the groups agree on a step before it is applied, and a closure would compute it again"
            )
        if makes_state(sys._getframe(1)) or self._extras.end(self.optim):
            return self.optim.step(**kwargs)
        self._lost = True  # for a GradScaler
        return None
