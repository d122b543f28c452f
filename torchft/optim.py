"""An optimizer that steps only when the step was committed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchft._extras import extras_of

if TYPE_CHECKING:
    from torchft.manager import Manager


class OptimizerWrapper(Optimizer):
    """Makes a step of a training loop a step of the Manager.

    ``zero_grad`` starts the quorum, ``step`` asks whether all finished and steps only then. Everything else is the
    wrapped optimizer's, hooks too: those of a step run when it was committed, and get the wrapped optimizer.

    The helpers of ``torch.distributed.checkpoint.state_dict`` make the state of a new optimizer by a step with zero
    gradients and no learning rate. When they call, the wrapped optimizer does that step: there is nothing to agree on.

    Args:
        manager: of this rank.
        optim: the optimizer to wrap.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        # Optimizer.__init__ is left out: the wrapped one owns the parameters and runs the hooks
        self.optim = optim
        self.manager = manager
        extras = extras_of(manager)
        extras.register_gradients(self._gradients)
        extras.compare_optimizer(optim)

    def _gradients(self) -> List[torch.Tensor]:
        return [p.grad for group in self.optim.param_groups for p in group["params"] if p.grad is not None]

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> Dict[str, Any]:
        return self.optim.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a step: starts the quorum, then clears the gradients."""
        if not _makes_state():
            self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Optional[object] = None) -> None:  # type: ignore[override]
        """Ends a step: applies the gradients if the step is committed.

        Raises:
            AssertionError: a closure was given; it would run the model again after the groups agreed.
        """
        if closure is not None:  # no assert statement: it must hold under python -O too
            raise AssertionError(
                f"closure={closure!r}: step() takes none, optimizers that call a closure are not supported: the groups "
                "agree on a step before it is applied, and a closure would compute it anew"
            )
        if _makes_state() or self.manager.should_commit():
            self.optim.step()

    @property
    def param_groups(self) -> List[Dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, object]:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> Dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optim!r})"


def _delegate(name: str) -> Callable[..., RemovableHandle]:
    def register(self: OptimizerWrapper, *args: Any, **kwargs: Any) -> RemovableHandle:
        return getattr(self.optim, name)(*args, **kwargs)

    register.__name__ = name
    register.__doc__ = f"PyTorch's `Optimizer.{name}`, of the wrapped optimizer."
    return register


for _name in (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):
    setattr(OptimizerWrapper, _name, _delegate(_name))


def _makes_state() -> bool:
    """Whether PyTorch's checkpoint helpers call the method that calls this, perhaps through a learning rate scheduler,
    which replaces an optimizer's `step`.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch.optim."):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
