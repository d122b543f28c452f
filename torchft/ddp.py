"""Data parallel wrappers that average gradients over the groups that take part in a step."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn import parallel

from torchft.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from torchft.manager import Manager

_BUCKET_FUTURE = torch.futures.Future[torch.Tensor]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel with its allreduces done by a Manager.

    The allreduce of a bucket overlaps with the rest of the backward pass: the first one of a step waits for the quorum,
    none waits for an allreduce. Backward never raises for a peer's failure; the step is then not committed.

    All groups must cut the gradients into the same buckets in the same order, also one that joins when the others are
    at step 1,000. So buckets are never rebuilt in the order of arrival, which PyTorch does after the first step unless
    ``find_unused_parameters`` is set; that is always set here. Parameters that took no part in the loss are therefore
    fine. With ``static_graph`` PyTorch rebuilds nevertheless, in an order known beforehand: see :class:`_StaticGraph`.

    Args:
        manager: of this rank.
        module: the model; all groups start from the same weights, or heal to them (``init_sync``).
        kwargs: of PyTorch's class; ``process_group`` and ``find_unused_parameters`` are set here.
    """

    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        if "process_group" in kwargs:
            raise ValueError("process_group: the Manager decides who takes part, so it cannot be given here")
        kwargs["find_unused_parameters"] = True
        # Said once by the reducer when there are no such parameters; here the reason to set it is another.
        warnings.filterwarnings("ignore", message=".*find_unused_parameters=True was specified")
        # The wrapped class talks to a group of one: what it broadcasts or reduces by itself stays in this process.
        super().__init__(module, process_group=ProcessGroupDummy(0, 1), **kwargs)
        if kwargs.get("static_graph"):
            graph = _StaticGraph(manager, self)
            self.register_comm_hook(graph, _StaticGraph.hook)
        else:
            self.register_comm_hook(manager, _allreduce_hook)


def _allreduce_hook(manager: Manager, bucket: dist.GradBucket) -> _BUCKET_FUTURE:
    return manager.allreduce(bucket.buffer()).get_future()  # type: ignore[return-value]


class _StaticGraph:
    """Keeps the buckets of all groups equal when the graph is static.

    In the first backward pass the reducer has one bucket, or a few, in reverse order of the parameters; after it, it
    rebuilds them in order of the parameters, with the first one small. A group in its first pass meets others long past
    it. So in the first pass the gradients are collected, cut as the rebuilt buckets will be, and reduced in those pieces;
    nothing is lost, as the reducer itself delays the first pass of a static graph to the end of backward.
    """

    def __init__(self, manager: Manager, ddp: DistributedDataParallel) -> None:
        self._manager = manager
        self._pieces = _rebuilt_buckets(ddp)
        self._collected: List[Tuple[dist.GradBucket, _BUCKET_FUTURE]] = []
        self._rebuilt = False

    @staticmethod
    def hook(self: _StaticGraph, bucket: dist.GradBucket) -> _BUCKET_FUTURE:
        if self._rebuilt:
            return _allreduce_hook(self._manager, bucket)
        future = _BUCKET_FUTURE()
        self._collected.append((bucket, future))
        if bucket.is_last():
            self._reduce_first_pass()
        return future

    def _reduce_first_pass(self) -> None:
        collected, self._collected, self._rebuilt = self._collected, [], True
        grads = {}
        for bucket, _ in collected:
            for param, grad in zip(bucket.parameters(), bucket.gradients()):
                grads[param] = grad
        flats = [torch.cat([grads[p].reshape(-1) for p in piece]) for piece in self._pieces]
        works = [self._manager.allreduce(flat) for flat in flats]

        def finish(_: object) -> None:
            for piece, flat in zip(self._pieces, flats):
                sizes = [p.numel() for p in piece]
                for param, part in zip(piece, flat.split(sizes)):
                    grads[param].copy_(part.view_as(grads[param]))
            for bucket, future in collected:
                future.set_result(bucket.buffer())

        torch.futures.collect_all([work.get_future() for work in works]).then(finish)


def _rebuilt_buckets(ddp: DistributedDataParallel) -> List[List[nn.Parameter]]:
    """The buckets that the reducer of a static graph has after its first pass, in the order it reduces them."""
    parameters, expect_sparse = ddp._build_params_for_reducer()
    config = getattr(ddp, "_bucket_config", None)  # older releases have a constant in its place
    first_bytes = config.first_bucket_bytes_cap if config is not None else dist._DEFAULT_FIRST_BUCKET_BYTES
    indices, _ = dist._compute_bucket_assignment_by_size(
        parameters, [first_bytes, ddp.bucket_bytes_cap], expect_sparse, list(range(len(parameters)))
    )
    return [[parameters[i] for i in bucket] for bucket in indices]


class PureDistributedDataParallel(nn.Module):
    """Averages each parameter's gradient by itself, with nothing of PyTorch's reducer: simple, and slow for small
    parameters.

    Each gradient is sent off as soon as it is final, and the end of the backward pass waits for all of them. Groups
    must produce their gradients in the same order.

    Args:
        manager: of this rank.
        module: the model.
    """

    def __init__(self, manager: Manager, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._manager = manager
        self._works: Optional[List[dist._Work]] = None  # of the backward pass that runs
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, param: torch.Tensor) -> None:
        if param.grad is None:
            return
        if self._works is None:
            self._works = []
            Variable._execution_engine.queue_callback(self._wait)
        self._works.append(self._manager.allreduce(param.grad))

    def _wait(self) -> None:
        works, self._works = self._works, None
        for work in works or []:
            work.wait()

    def forward(self, *args: object) -> object:
        self._works = None  # of a backward pass that raised half-way
        return self.module(*args)
