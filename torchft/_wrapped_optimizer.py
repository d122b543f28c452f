"""A base class of optimizers that wrap another one. Parameters, state and hooks stay in the wrapped one."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, List

import torch
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchft._copies import Copyable

if TYPE_CHECKING:
    from typing_extensions import Self


class WrappedOptimizer(Copyable, Optimizer):
    """Forwards everything to the wrapped optimizer except ``zero_grad`` and ``step``, which subclasses
    define.

    Attributes, too, are read from the wrapped optimizer and set on it, except those that a subclass has set
    before it calls this constructor.

    A copy wraps a copy of the wrapped optimizer. The Manager knows the original only: it neither compares nor
    heals the state of a copy.

    Args:
        optim: the optimizer to wrap.
    """

    _lost = False  # set by a call of `step` that applied nothing, because the step was not committed

    def __init__(self, optim: Optimizer) -> None:
        # Optimizer.__init__ is not called: the wrapped one owns the parameters and runs the hooks
        self.optim = optim

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> Dict[str, Any]:
        return self.optim.state_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not set yet
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if "optim" not in own or name in own or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.optim, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.optim, name)

    # Optimizer's own __setstate__ would patch `step` of this class, for hooks that the wrapped optimizer has
    def __getstate__(self) -> Dict[str, Any]:
        return self.optim.__getstate__()

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.optim.__setstate__(state)

    def _parts(self) -> Dict[str, Any]:
        # A learning rate scheduler sets `step` of an instance; its function calls that instance's method.
        return {name: value for name, value in self.__dict__.items() if not hasattr(type(self), name)}

    def _assemble(self, parts: Dict[str, Any]) -> None:
        self.__dict__.update(parts)

    def __copy__(self) -> Self:
        made = super().__copy__()
        made.__dict__["optim"] = copy.copy(self.optim)
        return made

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


def _attribute(name: str) -> property:
    """An attribute that PyTorch's class declares."""
    return property(
        lambda self: getattr(self.optim, name), lambda self, value: setattr(self.optim, name, value)
    )


def _one_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of GradScaler use the same state for a wrapper and the wrapped optimizer.

    GradScaler keeps by ``id(optimizer)`` whether gradients are unscaled. A library may unscale the wrapped
    optimizer's, and a training loop step the wrapper: with two states, the gradients would be divided by the
    scale twice.

    A class derived from GradScaler may have a method of its own in place of this one, as PyTorch's
    ShardedGradScaler has ``unscale_``. So the shared state is the one that exists, of whichever optimizer.
    """

    @functools.wraps(method)
    def called(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        chain = [optimizer]
        while isinstance(chain[-1], WrappedOptimizer):
            chain[-1]._lost = False
            chain.append(chain[-1].optim)
        if len(chain) > 1 and scaler.is_enabled():
            states = scaler._per_optimizer_states
            shared = next((states[id(one)] for one in chain if id(one) in states), None)
            for one in chain:
                states[id(one)] = states[id(chain[-1])] if shared is None else shared
        try:
            return method(scaler, optimizer, *args, **kwargs)
        finally:
            if any(isinstance(one, WrappedOptimizer) and one._lost for one in chain):
                _lost_one.add(scaler)

    return called


def _not_of_lost_steps(update: Callable[..., None]) -> Callable[..., None]:
    """Makes GradScaler's ``update`` ignore a step that was not committed: what failed reductions left in the
    gradients must not change the scale. It is the same in all groups, and in all attempts at a step.
    """

    @functools.wraps(update)
    def called(scaler: GradScaler, new_scale: Any = None) -> None:
        lost = scaler in _lost_one
        _lost_one.discard(scaler)
        if lost and new_scale is None:
            scaler._per_optimizer_states.clear()
        else:
            update(scaler, new_scale)

    return called


_lost_one: weakref.WeakSet[GradScaler] = weakref.WeakSet()  # scalers that had a lost step since their update

for _name in ("unscale_", "step"):
    setattr(GradScaler, _name, _one_state(getattr(GradScaler, _name)))
GradScaler.update = _not_of_lost_steps(GradScaler.update)  # type: ignore[method-assign]

for _name in (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):
    setattr(WrappedOptimizer, _name, _delegate(_name))

for _name in ("param_groups", "state", "defaults"):
    setattr(WrappedOptimizer, _name, _attribute(_name))
