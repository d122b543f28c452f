"""The parameters of a module that are synchronized, and the part of each in this process."""

from __future__ import annotations

from typing import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchft.checkpointing.codec.layout import local_part


def extract_local_tensor(t: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the part of ``t`` in this process: the shard of a DTensor, else all of it."""
    return local_part(t).clone()


def as_gradient_of(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns ``local`` in the form that ``parameter.grad`` needs: a DTensor for a DTensor."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def synchronized(module: nn.Module, what: str) -> dict[str, nn.Parameter]:
    """The parameters that groups average, by name: all floating point ones, including frozen ones.

    Buffers (the statistics of a batch norm) stay each group's own. Frozen parameters of other types, such as
    quantized weights, never change and so need no averaging.

    Raises:
        ValueError: there are none, or a trained parameter cannot be averaged.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"{what}={module!r}: allowed are modules of PyTorch")
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.dtype.is_floating_point:
            found[name] = parameter
        elif parameter.requires_grad:
            raise ValueError(
                f"{what}: parameter {name!r} is {parameter.dtype}; allowed are floating point types"
            )
    if not found:
        raise ValueError(
            f"{what} ({type(module).__name__}) has no floating point parameters: nothing to synchronize"
        )
    return found


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no value is NaN or Inf. Waits for the device once, and allocates only scalars.

    It reads the smallest and the largest value, which are NaN if any value is: on a CPU five times as fast as
    a norm.
    """
    ends = [end.isfinite() for t in tensors if t.numel() > 0 for end in t.aminmax()]
    return not ends or bool(torch.stack(ends).all())
