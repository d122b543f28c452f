"""Values of a step: batches on a device, the mean of the losses, and gradients that are added once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torchft.manager import Manager

_ONE = 2.0**32  # of a loss in a sum of integers


def on_device(value: Any, device: torch.device) -> Any:
    """Moves the tensors of a batch, in tuples, lists and mappings, to a device."""
    if hasattr(value, "to"):  # a tensor, or a batch of a tokenizer
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)
    if isinstance(value, dict):
        return type(value)((name, on_device(each, device)) for name, each in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(each, device) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(each, device) for each in value)
    return value


def check_reduced_once(manager: Manager, reduced: int) -> None:
    """Raises a RuntimeError if the loop has reduced gradients by itself since its batches ended.

    Args:
        manager: of this rank; without ``replay_failed_step`` it does not know.
        reduced: the number of tensors that were reduced then.
    """
    inputs = manager._current.inputs
    if len(inputs) > reduced and inputs.twice() is not None:
        error = RuntimeError(
            "the loop has reduced gradients that the job has reduced, so they were added twice: leave it to "
            "`for batch in step`"
        )
        manager.report_error(error)  # the other groups must not wait for this one
        raise error


class MeanLoss:
    """The mean of a step's losses: the sum of the weighted losses of all groups. It is reduced while the
    gradients of the last batch are computed.

    Args:
        manager: the Manager of this rank; None: the mean of this group alone.
        ranks: ranks of this group. Those that add a loss have weighted it for a mean over them.
        exact: sum integers, with a fraction of 32 bits, so that the order of the sum does not matter.
    """

    def __init__(self, manager: Optional[Manager], ranks: int, exact: bool) -> None:
        self._manager = manager
        self._ranks = ranks
        self._exact = exact
        self._sum: Optional[torch.Tensor] = None  # if exact, the second element counts infinities and NaN
        self._givers: Union[int, torch.Tensor] = 1  # ranks of this group that have added losses
        self._work: Optional[dist.Work] = None
        self._reduced = False

    def add(self, weighted: torch.Tensor) -> None:
        """Adds the weighted loss of a batch, of one element."""
        own = weighted.detach().double().reshape(1)
        if self._exact:
            bad = (~own.isfinite()).to(torch.int64)
            own = torch.cat([(own.nan_to_num(0, 0, 0) * _ONE).round().to(torch.int64), bad])
        self._sum = own if self._sum is None else self._sum + own

    def reduce(self, device: torch.device) -> None:
        """Begins to sum over all ranks. Nothing is added later."""
        given = self._sum is not None
        if self._sum is None:  # another stage of a pipeline has the losses
            shape, kind = (2, torch.int64) if self._exact else (1, torch.float64)
            self._sum = torch.zeros(shape, dtype=kind, device=device)
        if self._ranks > 1:
            own = torch.cat([self._sum, self._sum.new_tensor([given])])
            dist.all_reduce(own)
            self._sum, self._givers = own[:-1].contiguous(), own[-1]
        self._reduced = True
        if self._manager is not None:
            self._work = self._manager.allreduce(self._sum, reduce_op=dist.ReduceOp.SUM)

    def value(self) -> float:
        """Waits for the sum; NaN if it failed.

        Raises:
            RuntimeError: it has not begun.
        """
        if not self._reduced or self._sum is None:
            raise RuntimeError("step.loss is known after the last batch of the step")
        if self._work is not None and not self._work.wait():
            return math.nan
        total, givers = self._sum.tolist(), float(self._givers)
        if not self._exact:
            return total[0] / givers
        return math.nan if total[1] else total[0] / _ONE / givers
