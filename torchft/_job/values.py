"""Values of a step: batches on a device, the mean of the losses, and gradients that are added once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from torchft import ddp

if TYPE_CHECKING:
    from torchft.data.loader import ElasticDataLoader
    from torchft.manager import Manager

_ALIGNED = 64  # elements


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


def check_loss(loss: Any) -> None:
    """Raises a TypeError unless this is a loss of one element that needs gradients."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise TypeError(f"loss is {what}: it has to be a tensor of one element that needs gradients")


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


class LossSum(nn.Module):
    """The sum of a step's weighted losses, as the gradient of a parameter. So it is reduced like gradients,
    and with them: in a bucket of DistributedDataParallel, or in the integers of ``reproducible``.

    Args:
        model: whose gradients it is to be reduced with.

    Attributes:
        carried: whether a bucket of a DistributedDataParallel has it.
    """

    carried = False

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        wide = any(p.dtype == torch.float64 for p in model.parameters())
        # In a bucket, the gradients behind it are as aligned as without it.
        zeros = torch.zeros(_ALIGNED, dtype=torch.float64 if wide else torch.float32, device=device)
        self.sum = nn.Parameter(zeros)

    def forward(self, weighted: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of one element, whose backward pass adds a loss, of one element, to the sum."""
        return self.sum[0] * weighted.detach().reshape(()).to(self.sum)

    def mean(self, averaged: bool) -> torch.Tensor:
        """Returns the sum, of one element, as a mean over the ranks of this group that have added losses.
        `averaged`: whether the ranks of this group have averaged it.
        """
        given = self.sum.grad is not None
        own = self.sum.grad[:1].clone() if self.sum.grad is not None else self.sum.new_zeros(1)
        if averaged or not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        both = torch.cat([own, own.new_tensor([given])])
        dist.all_reduce(both)
        return both[:1] / both[1:]


class DistributedDataParallel(ddp.DistributedDataParallel):
    """torchft's, whose first one in a job reduces the sum of the losses with the gradients. `losses`: the
    sum. A loss is added in each backward pass.
    """

    def __init__(self, manager: Manager, module: nn.Module, losses: LossSum) -> None:
        self.more = () if losses.carried else (losses.sum,)
        losses.carried = True
        super().__init__(manager, module)

    def _ddp_init_helper(self, parameters: list[Any], expect_sparse_gradient: list[bool], *rest: Any) -> None:
        # In front: behind the others, it might have a bucket of its own.
        names, *others = rest
        more = len(self.more)
        names = {**dict.fromkeys(range(more), "step.loss"), **{i + more: each for i, each in names.items()}}
        sparse = [False] * more + expect_sparse_gradient
        super()._ddp_init_helper([*self.more, *parameters], sparse, names, *others)


def replicated(models: list[nn.Module], loader: ElasticDataLoader) -> list[torch.Tensor]:
    """The parameters of ``models`` that the ranks of this group hold alike while they read different data."""
    several = loader.data_world_size > 1
    wrapped = [each for each in models if several and isinstance(each, DistributedDataParallel)]
    return [parameter for each in wrapped for parameter in (*each.more, *each.parameters())]
