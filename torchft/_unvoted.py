"""Refuses the step of an optimizer that would apply averaged gradients without a commit.

An optimizer that is in no OptimizerWrapper asks for no vote. After a failure it would apply gradients that
were not averaged, or were averaged in this group only, and the weights of the groups would differ.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_lock = threading.Lock()
# None before the first model. Replaced, never changed: optimizers of other threads read it.
_models: tuple[weakref.ref[Any], ...] | None = None


def watch(model: Any) -> None:
    """Makes the optimizers of this process refuse to change this model's parameters before a commit.

    Its ``_awaits_commit()`` tells whether its gradients were reduced in the Manager's step, and that step is
    not committed.
    """
    global _models
    with _lock:
        if _models is None:
            register_optimizer_step_pre_hook(before_step)
        alive = [ref for ref in _models or () if (known := ref()) is not None and known is not model]
        _models = (*alive, weakref.ref(model))


def before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Raises a RuntimeError in place of a step that no commit precedes. It changes nothing."""
    if torch.compiler.is_compiling():
        return
    for ref in _models or ():
        model = ref()
        if model is None or not model._awaits_commit():
            continue
        reduced = {id(parameter) for parameter in model.parameters()}
        given = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if not reduced.isdisjoint(given) and not makes_state(sys._getframe(1)):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: this model's gradients were averaged in a step that is "
                "not committed, and would be applied all the same: wrap the optimizer in "
                "torchft.optim.OptimizerWrapper and call zero_grad and step of the wrapper, or, without one, "
                "call step only if Manager.should_commit() has returned True"
            )


def makes_state(frame: FrameType) -> bool:
    """Whether a step was called by a function of PyTorch's state_dict module, directly or through a learning
    rate scheduler, which replaces an optimizer's `step`. `frame`: of the caller of the step, or of PyTorch's
    or torchft's code that it calls.
    """
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_PASSED_BY):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


_PASSED_BY = ("torch.optim.", "torchft.optim")
