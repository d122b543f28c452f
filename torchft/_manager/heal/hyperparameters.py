"""The hyperparameters of the sources of a heal, which travel with the state and are set after it is loaded.

The user's functions may leave them out, or give those of an earlier step: torchtitan keeps an optimizer's
state dict, whose tensors are the optimizer's own, but whose learning rate stays that of the first step. The
scheduler sets the right one only after the step of the heal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from torchft._wrapped_optimizer import WrappedOptimizer

# The values that travel. Others, such as functions, belong to the script of each group.
_PLAIN = (bool, int, float, str, type(None), torch.Tensor)

KEY = "hyperparameters"  # in the state that a heal transfers, beside those of the user and of the Manager

Groups = list[list[dict[str, Any]]]


def read(optimizers: Sequence[Optimizer]) -> Groups:
    """Returns the hyperparameters of each parameter group of each optimizer."""
    return [
        [
            {
                key: value
                for key, value in group.items()
                if key != "params" and all(isinstance(one, _PLAIN) for one in _items(value))
            }
            for group in optimizer.param_groups
        ]
        for optimizer in _all(optimizers)
    ]


def _all(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers, and those that they hold: torchtitan's container is an optimizer with a list of others,
    which have the learning rates.
    """
    found: dict[int, Optimizer] = {}
    todo: list[Any] = list(reversed(optimizers))
    while todo:
        one = todo.pop()
        if isinstance(one, (list, tuple)):
            todo += [inner for inner in reversed(one) if isinstance(inner, Optimizer)]
        elif isinstance(one, WrappedOptimizer):
            todo.append(one.optim)
        elif isinstance(one, Optimizer) and id(one) not in found:
            found[id(one)] = one
            todo += reversed(vars(one).values())
    return list(found.values())


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else [value]


def _has_tensors(value: Any) -> bool:
    return any(isinstance(one, torch.Tensor) for one in _items(value))


def changed(before: Groups, after: Groups) -> Groups:
    """The values of ``after`` that differ from ``before``; never tensors, which change in place."""
    return [
        [
            {
                key: value
                for key, value in values.items()
                if key in old and not _has_tensors(value) and not _has_tensors(old[key]) and old[key] != value
            }
            for old, values in zip(old_groups, groups)
        ]
        for old_groups, groups in zip(before, after)
    ]


@torch.no_grad()
def write(optimizers: Sequence[Optimizer], given: Groups) -> None:
    """Sets hyperparameters of :func:`read`. ValueError: the source has other optimizers or groups."""
    own = _all(optimizers)
    here, there = [len(one.param_groups) for one in own], [len(groups) for groups in given]
    if here != there:
        raise ValueError(f"the optimizers here have {here} parameter groups, those of the source {there}")
    for optimizer, groups in zip(own, given):
        for group, values in zip(optimizer.param_groups, groups):
            for key, value in values.items():
                present = group.get(key)
                if isinstance(present, torch.Tensor):  # it stays: a CUDA graph may have captured it
                    present.copy_(torch.as_tensor(value))
                else:
                    group[key] = value
