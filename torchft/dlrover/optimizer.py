"""An optimizer whose steps average over a batch of a fixed size, for any number of workers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Optional

import torch.distributed as dist
from torch.optim import Optimizer

from torchft._extras import extras_of
from torchft._manager.step.work import managed
from torchft._wrapped_optimizer import WrappedOptimizer

if TYPE_CHECKING:
    from torchft.manager import Manager

WORKER_NUM_ENV = "WORKER_NUM"
MAX_WORKER_NUM_ENV = "MAX_WORKER_NUM"


def backward_passes(max_workers: int, workers: int) -> int:
    """Number of backward passes of each worker in a step, so that all workers together do ``max_workers``
    passes.

    Raises:
        ValueError: the workers cannot share the passes equally.
    """
    if workers < 1 or max_workers % workers:
        allowed = [n for n in range(1, max_workers + 1) if max_workers % n == 0]
        raise ValueError(
            f"{MAX_WORKER_NUM_ENV} / {WORKER_NUM_ENV} = {max_workers} / {workers} is no integer, so the "
            "batch of a "
            f"step would have another size; allowed numbers of workers: {', '.join(map(str, allowed))}"
        )
    return max_workers // workers


class DistributedOptimizer(WrappedOptimizer):
    """Steps once in ``backward_passes_per_step`` calls of ``step``, with the mean gradient over all passes
    and workers.

    Gradients are accumulated, and reduced in the last pass only. Call ``zero_grad`` and ``step`` in each
    pass.

    Args:
        optimizer: the optimizer, whose parameters' gradients are reduced.
        fixed_global_batch_size: whether all workers together do MAX_WORKER_NUM passes in a step; else each
            worker does one.
        manager: the Manager: the workers are its participants, and ``step`` steps only if the step is
            committed. Without one, WORKER_NUM is the number of workers, and gradients are reduced in
            ``process_group``.
        process_group: process group of all workers; default: PyTorch's default group.

    Attributes:
        backward_passes_per_step: number of backward passes in the present step.

    Raises:
        ValueError: WORKER_NUM or MAX_WORKER_NUM is missing or no positive whole number, MAX_WORKER_NUM is no
            multiple of the number of workers, or WORKER_NUM is not the size of the process group.
    """

    _of_this_process = ("_manager", "_extras", "_group")
    _remedy = "wrap its attribute `optim` anew"

    def __init__(
        self,
        optimizer: Optimizer,
        fixed_global_batch_size: bool = False,
        manager: Optional[Manager] = None,
        process_group: Optional[dist.ProcessGroup] = None,
    ) -> None:
        self._fixed = fixed_global_batch_size
        self._manager = manager
        self._extras = extras_of(manager)
        self._group: Any = process_group
        self._workers = 1
        self._passes = 0  # number of completed passes of this step
        self.backward_passes_per_step = 1
        super().__init__(optimizer)
        if manager is None:
            self._count_workers()
        elif fixed_global_batch_size:
            _from_env(MAX_WORKER_NUM_ENV)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins the step and clears the gradients, before its first pass; before others it does nothing."""
        if self._passes:
            return
        if self._manager is not None:
            if self._extras.adds_gradients:
                raise ValueError(
                    "DistributedOptimizer and ElasticDataLoader both keep the batch of a step with any "
                    "number of "
                    "workers: with the loader, use torchft.Optimizer and multiply each loss by unit.weight"
                )
            self._manager.start_quorum()
        self._count_workers()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Optional[object] = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call it after each backward pass. The last one of a step reduces the gradients and steps."""
        if closure is not None:
            raise ValueError("closure: step() takes none, since it would compute a part of the batch again")
        self._passes += 1
        if self._passes < self.backward_passes_per_step:
            return None
        self._passes = 0
        self._reduce()
        if self._manager is None or self._manager.should_commit():
            return self.optim.step(**kwargs)
        return None

    def _count_workers(self) -> None:
        if self._manager is not None:
            self._workers = self._manager.num_participants()
        else:
            self._workers = _from_env(WORKER_NUM_ENV)
            if self._group is None and dist.is_initialized():
                self._group = dist.group.WORLD
            size = self._group.size() if self._group is not None else 1
            if size != self._workers:
                raise ValueError(f"{WORKER_NUM_ENV}={self._workers}: the process group has {size} ranks")
        most = _from_env(MAX_WORKER_NUM_ENV) if self._fixed else self._workers
        self.backward_passes_per_step = backward_passes(most, self._workers)

    def _reduce(self) -> None:
        gradients = self._gradients()
        passes = self.backward_passes_per_step * (self._workers if self._manager is None else 1)
        for gradient in gradients:
            gradient.div_(passes)
        if self._manager is not None:  # the Manager averages over the participants
            if self._fixed:
                self._extras.refuse_replay(
                    "with fewer workers, DistributedOptimizer needs more backward passes"
                )
            works = [
                managed(self._manager, self._manager.allreduce(gradient), gradient) for gradient in gradients
            ]
        elif self._workers > 1:
            works = [self._group.allreduce([gradient], dist.AllreduceOptions()) for gradient in gradients]
        else:
            works = []
        for work in works:
            work.wait()


def _from_env(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isascii() or not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{name}={value!r} is not allowed; allowed: a whole number, at least 1")
    return int(value)
