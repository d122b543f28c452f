"""A base class of optimizers that wrap another one. Parameters, state and hooks stay in the wrapped one."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class WrappedOptimizer(Optimizer):
    """Forwards everything to the wrapped optimizer except ``zero_grad`` and ``step``, which subclasses define.

    Args:
        optim: the optimizer to wrap.
    """

    def __init__(self, optim: Optimizer) -> None:
        # Optimizer.__init__ is not called: the wrapped one owns the parameters and runs the hooks
        self.optim = optim

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> Dict[str, Any]:
        return self.optim.state_dict()

    @property
    def param_groups(self) -> List[Dict[str, Any]]:  # type: ignore[override]
        return self.optim.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, object]:  # type: ignore[override]
        return self.optim.state

    @property
    def defaults(self) -> Dict[str, Any]:  # type: ignore[override]
        return self.optim.defaults

    def _gradients(self) -> List[torch.Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"


def _delegate(name: str) -> Callable[..., RemovableHandle]:
    def register(self: WrappedOptimizer, *args: Any, **kwargs: Any) -> RemovableHandle:
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
    setattr(WrappedOptimizer, _name, _delegate(_name))
