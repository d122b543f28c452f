"""FSDP2's part of ``reproducible_reduction``: gradients leave its backward pass as integers.

FSDP2 reduces the gradients of a module over the ranks of the group as soon as its backward pass has computed
them, by an object that can be replaced. The one here turns a unit's gradients into integers, adds those of
all ranks, and keeps this rank's shards in an :class:`~torchft.data.exact_sum.ExactSum`. FSDP2 itself gets
zeros. The sums are reduced over the groups after the last unit, as those of other parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist

from torchft.data.exact_sum import ExactSum

_SETTING = "reproducible_reduction=True"
_OTHERWISE = (
    "choose reproducible_reduction=False: weights then equal those of one process except for rounding"
)


class ShardedGradients:
    """The FSDP2 modules of some models.

    Args:
        models: FSDP2 modules, or modules that contain some.
        ranks: the number of ranks of the group.

    Raises:
        ValueError: a model cannot be summed, or this release of PyTorch has no replaceable reduction.
    """

    def __init__(self, models: tuple[Any, ...], ranks: int) -> None:
        # Two names may lead to one module, and some modules share a reduction.
        modules = {id(module): module for model in models for module in model.modules()}
        self._modules = [each for each in modules.values() if hasattr(each, "set_requires_gradient_sync")]
        _check_sharding(models, bool(self._modules), ranks)
        self._reductions = [
            _Reduction(module, group, ranks) for module in self._modules for group in _groups(module)
        ]

    def begin_unit(self, total: ExactSum, counted: bool) -> None:
        """Makes the backward pass of a unit add its gradients to a sum."""
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_requires_all_reduce(False, recurse=False)
            # FSDP2 divides some data types before it reduces them, unless the factor is 1.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        for reduction in self._reductions:
            reduction.begin_unit(total, counted)

    def end_unit(self) -> None:
        """Ends a unit after its backward pass."""
        for reduction in self._reductions:
            reduction.end_unit()


class _Reduction:
    """Reduces the gradients of an FSDP2 module in place of FSDP2, in one unit after the other.

    Args:
        module: the module.
        group: FSDP2's record of its parameters.
        ranks: the number of ranks of the group.
    """

    def __init__(self, module: Any, group: Any, ranks: int) -> None:
        self._group = group
        self._ranks = ranks
        self._total: Optional[ExactSum] = None  # None outside of a unit
        self._counted = False
        self._buffers: list[torch.Tensor] = []  # of FSDP2, which this has not reduced
        module.set_custom_reduce_scatter(self)

    def begin_unit(self, total: ExactSum, counted: bool) -> None:
        self._total, self._counted, self._buffers = total, counted, []

    def end_unit(self) -> None:
        for gradients in self._buffers[::2]:  # of a single rank, for which FSDP2 reduces nothing
            self._add(gradients, lambda integers: integers[0])
        self._total, self._buffers = None, []
        self._group._partial_reduce_output = None  # HSDP's zeros, which it keeps for an allreduce

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Makes a buffer for FSDP2: first that of the gradients, then that of the reduced ones."""
        self._buffers.append(torch.empty(*size, dtype=dtype, device=device))
        return self._buffers[-1]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **_: Any
    ) -> None:
        """Called by FSDP2 in the backward pass, on its stream for the reduction."""
        self._buffers.clear()

        def scatter(integers: torch.Tensor) -> torch.Tensor:
            mine = torch.empty_like(integers[0])
            dist.reduce_scatter_tensor(mine, integers.view(-1), group=group)
            return mine

        self._add(input_tensor, scatter)
        output_tensor.zero_()

    def _add(self, gradients: torch.Tensor, scatter: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self._total is None:
            raise RuntimeError(
                f"{_SETTING}: a backward pass outside of `with unit.accumulate(model)`; gradients of a batch "
                "are those of its units"
            )
        parameters = [each for each in self._parameters() if each.requires_grad]
        try:
            self._total.add_sharded(
                parameters, gradients.view(self._ranks, -1), scatter, counted=self._counted
            )
        except ValueError as e:
            raise ValueError(
                f"{_SETTING}: not all parameters of an FSDP2 module have a gradient in this unit, and FSDP2 "
                "leaves the others out: freeze these, or call model.set_reduce_scatter_unused_params(True) "
                f"({e})"
            ) from e

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        """In the order of their gradients in the buffer, which newer releases sort by data type."""
        parameters = self._group.fsdp_params
        for index in getattr(self._group, "_reduce_scatter_param_indices", range(len(parameters))):
            yield parameters[index].sharded_param


def _groups(module: Any) -> list[Any]:
    """FSDP2's records of the parameters that a module reduces together: one, or none without parameters.
    ValueError: this release of PyTorch does not have them.
    """
    needed = "set_custom_reduce_scatter", "set_gradient_divide_factor", "set_force_sum_reduction_for_comms"
    for name in needed:
        if not hasattr(module, name):
            raise ValueError(
                f"{_SETTING}: FSDP2 of PyTorch {torch.__version__} has no {name}, without which gradients "
                f"cannot be added as integers: install a newer PyTorch, or {_OTHERWISE}"
            )
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [each for each in [getattr(state, "_fsdp_param_group", None)] if each is not None]
    if any(not hasattr(group, "fsdp_params") for group in groups):
        raise ValueError(
            f"{_SETTING}: FSDP2 of PyTorch {torch.__version__} does not say which parameters it reduces "
            f"together: {_OTHERWISE}"
        )
    return list(groups)


def _check_sharding(models: tuple[Any, ...], has_fsdp: bool, ranks: int) -> None:
    """Raises ValueError for a parameter that is a DTensor and not sharded by FSDP2 over all ranks."""
    for model in models:
        for name, parameter in model.named_parameters():
            placements = getattr(parameter, "placements", None)
            if placements is None:
                continue
            sizes = [parameter.device_mesh.size(dim) for dim, p in enumerate(placements) if p.is_shard()]
            others = [p for p in placements if not p.is_shard() and not p.is_replicate()]
            if not has_fsdp or others or sizes != [ranks]:
                raise ValueError(
                    f"{_SETTING}: parameter {name} is placed as {tuple(placements)} on "
                    f"{parameter.device_mesh}; allowed are parameters that FSDP2 shards over the {ranks} "
                    f"ranks of the group, and no tensor parallelism. For others {_OTHERWISE}"
                )
