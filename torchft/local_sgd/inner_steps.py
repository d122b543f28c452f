"""Hooks that run after each step of an inner optimizer within a ``with`` block, and counts of steps."""

from __future__ import annotations

import logging
import math
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional

from torch import optim
from torch.utils.hooks import RemovableHandle

from torchft._extras import extras_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchft.manager import Manager

_logger = logging.getLogger("torchft.local_sgd")


def whole(name: str, value: Any) -> int:
    """Converts an argument of any numeric type to an int; ValueError unless it is a whole number."""
    if isinstance(value, Real) and math.isfinite(value) and value % 1 == 0:
        return round(float(value))
    raise ValueError(f"{name}={value!r}: allowed are whole numbers")


class InnerSteps:
    """Keeps healing groups from reading the state during a step of the inner optimizer, and calls
    :meth:`_after_step`.

    Attributes:
        keeps_own_weights: whether a group whose synchronization fails continues with its own weights.
        nonfinite_syncs: number of synchronizations whose average contained NaN or Inf. It is used
            nevertheless.

    Args:
        manager: the Manager of this rank.
        optimizer: the inner optimizer.
        name: the caller's name of that argument, for errors.

    Raises:
        ValueError: `optimizer` is not an optimizer of PyTorch.
    """

    keeps_own_weights = False

    def __init__(self, manager: Manager, optimizer: optim.Optimizer, name: str) -> None:
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ValueError(f"{name}={optimizer!r}: allowed are optimizers of PyTorch")
        self._manager = manager
        self._local_optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        self.nonfinite_syncs = 0
        self._extras = extras_of(manager)
        self._extras.steps_by_itself(self)

    @property
    def entered(self) -> bool:
        """Whether the hooks are registered."""
        return bool(self._hooks)

    def synchronize(self) -> None:
        """Synchronizes with the other groups now."""
        raise NotImplementedError(f"{type(self).__name__}.synchronize")

    def _count_nonfinite(self, problem: str) -> None:
        """Counts a synchronization whose average contained NaN or Inf."""
        self.nonfinite_syncs += 1
        self._extras.counted("nonfinite_syncs")
        _logger.warning("%s (%d so far)", problem, self.nonfinite_syncs)

    def __enter__(self) -> Self:
        if self._hooks:
            raise RuntimeError(f"{type(self).__name__} is entered already")
        self._hooks = [
            self._local_optimizer.register_step_pre_hook(self._before),
            self._local_optimizer.register_step_post_hook(self._after),
        ]
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> bool:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._manager.allow_state_dict_read()  # PyTorch runs no post hook after a step that raised
        return False

    def _before(self, *_: Any) -> None:
        self._manager.disallow_state_dict_read()

    def _after(self, *_: Any) -> None:
        self._extras.inner_step_ended()
        self._manager.allow_state_dict_read()
        self._after_step()

    def _after_step(self) -> None:
        raise NotImplementedError(f"{type(self).__name__}._after_step")
