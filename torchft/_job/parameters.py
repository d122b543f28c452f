"""The parameters that a job trains: whether optimizers and models fit, and the norm of all gradients."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import parallel
from torch.optim import Optimizer

from torchft._wrapped_optimizer import WrappedOptimizer

if TYPE_CHECKING:
    from torchft.manager import Manager


def check_models(models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Raises a ValueError unless the optimizers step exactly the parameters of the models."""
    if not optimizers or not models:
        raise ValueError("prepare() was given no model or no optimizer: the groups have nothing to average")
    stepped = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in stepped:
                raise ValueError(
                    f"parameter {name} of {type(model).__name__} is in no optimizer of prepare(): its "
                    "gradient would be averaged and never used. Give its optimizer to prepare(), or set "
                    "requires_grad=False; what follows the weights, such as an average of them, goes to "
                    "job.state(name, object)"
                )
    known = {id(p) for model in models for p in model.parameters()}
    for each in optimizers:
        for parameter in (p for group in each.param_groups for p in group["params"]):
            if parameter.requires_grad and id(parameter) not in known:
                raise ValueError(
                    f"{type(each).__name__} has a parameter of shape {tuple(parameter.shape)} that is in no "
                    "model of prepare(): no group would get the others' gradients of it"
                )


def check_scaler(scaler: Optional[GradScaler], models: Sequence[nn.Module], ranks: int) -> None:
    """Raises a ValueError if the ranks of a group would not see the same infinities."""
    if scaler is not None and ranks > 1 and any(isinstance(model, FSDPModule) for model in models):
        raise ValueError(
            "a GradScaler and a sharded model: each rank sees the infinities of its own shard only; use "
            "bfloat16, which needs no scaler"
        )


def check_plain(given: Any) -> None:
    """Raises a ValueError for what would reduce gradients, or vote, in addition to the job."""
    if isinstance(given, (parallel.DistributedDataParallel, FullyShardedDataParallel)):
        raise ValueError(
            f"prepare() was given {type(given).__name__}, which reduces gradients by itself, so they would "
            "be added twice: give its `module`, the plain one, or shard that by fully_shard"
        )
    if isinstance(given, WrappedOptimizer):
        raise ValueError(
            f"prepare() was given {type(given).__name__}, which votes on each step by itself: give its "
            "`optim`, the plain optimizer"
        )


def is_stage(given: Any) -> bool:
    """Whether this is a stage of a pipeline, with its module in ``submod``. ValueError: its module reduces
    gradients in each call of the schedule, so not once in a step.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining")  # not imported: its import takes long
    if pipelining is None or not isinstance(given, pipelining.PipelineStage):
        return False
    kinds = (parallel.DistributedDataParallel, FSDPModule)
    if any(isinstance(module, kinds) for module in given.submod.modules()):
        raise ValueError(
            "the module of a pipeline stage reduces its gradients in each call of the schedule, and a step "
            "has several: give a plain module to PipelineStage"
        )
    return True


def reduce_plain(models: Iterable[nn.Module], manager: Manager) -> None:
    """Averages the gradients of models that are neither wrapped nor sharded over the groups. Those that one
    collective reduces become views of one tensor.
    """
    plain = [
        model
        for model in models
        if not isinstance(model, parallel.DistributedDataParallel)
        and not any(isinstance(module, FSDPModule) for module in model.modules())
    ]
    works = []
    for parameters in _reduced_together(p for model in plain for p in model.parameters()):
        gradients = [p.grad for p in parameters if p.grad is not None]
        packed = gradients[0]
        if len(gradients) > 1:
            packed = torch.cat([gradient.flatten() for gradient in gradients])
            for parameter, part in zip(parameters, packed.split([each.numel() for each in gradients])):
                parameter.grad = part.view_as(parameter)
        works.append(manager.allreduce(packed))
    for work in works:
        work.wait()


def average_in_group(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Averages gradients in place over the ranks of a process group."""
    for together in _reduced_together(parameters):
        gradients = [p.grad for p in together if p.grad is not None]
        (group.allreduce(gradients) if len(gradients) == 1 else group.allreduce_coalesced(gradients)).wait()
        for gradient in gradients:
            gradient /= group.size()


def _reduced_together(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the parameters that have a gradient, in lists for one collective each: those of one dtype, and
    each that has a sparse gradient.
    """
    lists: dict[tuple[torch.dtype, Optional[int]], list[torch.Tensor]] = {}
    for i, parameter in enumerate(parameters):
        if parameter.grad is not None:
            alone = i if parameter.grad.is_sparse else None
            lists.setdefault((parameter.grad.dtype, alone), []).append(parameter)
    return list(lists.values())


def forget_gradients(optimizers: Iterable[Optimizer]) -> None:
    """Makes the state of new optimizers loadable, though a step may have been lost before: PyTorch gives none
    to one whose parameters have gradients, and loads none then.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()


def root_of(models: Sequence[nn.Module]) -> nn.Module:
    """Returns one module that has the parameters of all, with their own names if there is one model."""
    return models[0] if len(models) == 1 else nn.ModuleList(models)


def clip(parameters: Iterable[torch.Tensor], max_norm: float, stages: bool) -> torch.Tensor:
    """Scales gradients so that the norm of all of them is at most ``max_norm``.

    Args:
        parameters: of this rank: whole ones, or shards as DTensors.
        max_norm: the largest norm.
        stages: whether the ranks of the group have different parameters, as the stages of a pipeline.

    Returns:
        The norm before, a tensor of one element.
    """
    given = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in given if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    elif stages:
        squared = norm.square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
    nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm


def finite(scaler: Optional[GradScaler], optimizers: Sequence[Optimizer]) -> bool:
    """Whether the optimizers step: a GradScaler decides for each, a batch counts for all or none."""
    if scaler is None or len(optimizers) < 2 or not scaler.is_enabled():
        return True
    states = scaler._per_optimizer_states
    for optimizer in optimizers:
        if not states[id(optimizer)]["found_inf_per_device"]:  # not unscaled yet
            scaler.unscale_(optimizer)
    return not any(
        found.item() for each in optimizers for found in states[id(each)]["found_inf_per_device"].values()
    )
