"""Data parallel wrappers that average gradients over the participants of a step."""

# No `from __future__ import annotations`: PyTorch compares the annotations of communication hooks with types.

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn import parallel

from torchft._extras import Extras, extras_of
from torchft._manager.work import managed
from torchft.process_group import ProcessGroupDummy
from torchft.utils import devices_of

if TYPE_CHECKING:
    from torchft.manager import Manager

T = TypeVar("T")

_BUCKET_FUTURE = torch.futures.Future[torch.Tensor]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel, whose allreduces go through a Manager.

    The allreduce of a bucket overlaps with the rest of the backward pass: only the first one of a step blocks, until
    there is a quorum. If a peer fails, backward raises no error; the step is not committed.

    All groups must cut the gradients into the same buckets in the same order, including a group that joins when the
    others are at step 1,000. PyTorch rebuilds the buckets after the first step, in the order in which gradients
    arrived, unless ``find_unused_parameters`` is set. So this class always sets it, and ignores the caller's value.
    Parameters that took no part in the loss are therefore allowed. If there are none, PyTorch warns once; ignore that
    warning. With ``static_graph`` PyTorch rebuilds the buckets nevertheless: see :class:`_StaticGraph`.

    Gradients are views of the buckets (``gradient_as_bucket_view``) unless the caller says otherwise. The number of
    participants is known only after the allreduce, so averaging takes another pass over all gradients. In return, the
    views save the pass that copies the gradients back, and the memory of the copy. As PyTorch documents for the option,
    such a gradient cannot be detached in place, and is overwritten in the next backward pass.

    Args:
        manager: the Manager of this rank.
        module: the model; all groups start from the same weights, or heal to them (``init_sync``).
        kwargs: arguments of PyTorch's class, except ``process_group`` and ``find_unused_parameters``.
    """

    def __init__(self, manager: "Manager", module: nn.Module, **kwargs: Any) -> None:
        if "process_group" in kwargs:
            raise ValueError("process_group is not allowed: the Manager selects the participants of each step")
        # A static graph finds unused parameters itself, and PyTorch warns if both are set.
        kwargs["find_unused_parameters"] = not kwargs.get("static_graph", False)
        kwargs.setdefault("gradient_as_bucket_view", True)
        # The wrapped class gets a process group of one rank, so its own broadcasts and reductions stay in this process.
        super().__init__(module, process_group=ProcessGroupDummy(0, 1), **kwargs)
        if kwargs.get("static_graph"):
            self._reduces: Any = _StaticGraph(manager, self)
            hook: Callable[[Any, dist.GradBucket], _BUCKET_FUTURE] = _StaticGraph.hook
        else:
            hook = _allreduce_hook if self.gradient_as_bucket_view else _copied_allreduce_hook
            self._reduces = _Through(manager, extras_of(manager))
        self.register_comm_hook(None, _of_weak(self._reduces, hook))
        ignored = set(self.parameters_to_ignore)
        extras_of(manager).register_parameters(lambda: [p for p in module.named_parameters() if p[0] not in ignored])

    def __getstate__(self) -> Dict[str, Any]:
        state = super().__getstate__()
        del state["_reduces"]  # like the reducer, which is made anew
        return state


def _of_weak(state: T, hook: Callable[[T, dist.GradBucket], _BUCKET_FUTURE]) -> Any:
    """A communication hook that does not keep its state alive.

    PyTorch's reducer, which owns the hook, is C++ code whose references the garbage collector does not see: a Manager
    whose state functions refer to the model would never be collected.
    """
    ref = weakref.ref(state)

    def call(_: object, bucket: dist.GradBucket) -> _BUCKET_FUTURE:
        state = ref()
        assert state is not None  # the model, whose backward pass this is, refers to it
        return hook(state, bucket)

    return call


@dataclass(frozen=True)
class _Through:
    """The state of a communication hook that reduces a bucket."""

    manager: "Manager"
    extras: Extras

    def allreduce(self, tensor: torch.Tensor) -> dist._Work:
        return managed(self.manager, self.manager.allreduce(tensor), tensor)


def _copied_allreduce_hook(through: _Through, bucket: dist.GradBucket) -> _BUCKET_FUTURE:
    through.extras.refuse_replay("gradients are copies of what is reduced (gradient_as_bucket_view=False)")
    return _allreduce_hook(through, bucket)


def _allreduce_hook(through: _Through, bucket: dist.GradBucket, in_pass: bool = True) -> _BUCKET_FUTURE:
    buffer = bucket.buffer()
    through.extras.share_buffer(buffer)  # the buffer belongs to DDP; gradients are views of it, and move with it
    work = through.allreduce(buffer)
    # The reducer waits for the future, without a deadline and deaf to signals. The future may complete only in a wait
    # for the work, so that comes first: at the end of the backward pass, before the reducer's own.
    if in_pass:
        Variable._execution_engine.queue_callback(work.wait)  # type: ignore[arg-type]
    else:
        work.wait()
    return work.get_future()  # type: ignore[return-value]


class _StaticGraph:
    """Makes all groups reduce the same pieces, although their reducers rebuild their buckets.

    The reducer of a static graph begins with one bucket and rebuilds it after its second backward pass, in the order in
    which gradients arrived. A group in its first pass may train with groups that have rebuilt their buckets already. So
    the first pass records the order, and computes from it the buckets that the reducer will build: the pieces. A bucket
    that equals a piece is reduced directly. Other buckets are collected until the pass ends, and cut into the pieces.
    Their reduction does not overlap with the backward pass. In the first pass, which has one bucket, the reducer's own
    reduction would not overlap either.
    """

    def __init__(self, manager: "Manager", ddp: "DistributedDataParallel") -> None:
        self._through = _Through(manager, extras_of(manager))
        self._ddp = ddp
        self._pieces: List[List[torch.Tensor]] = []
        self._known: Set[Tuple[int, ...]] = set()
        self._collected: List[Tuple[dist.GradBucket, _BUCKET_FUTURE]] = []
        self._arrived: Dict[torch.Tensor, None] = {}
        self._noting = [p.register_post_accumulate_grad_hook(self._note) for p in ddp.parameters() if p.requires_grad]

    @staticmethod
    def hook(graph: "_StaticGraph", bucket: dist.GradBucket) -> _BUCKET_FUTURE:
        first = not graph._pieces  # the reducer then calls the hook after the pass, and waits at once
        if first:
            graph._work_out_pieces()
        if not graph._collected and _key(bucket.parameters()) in graph._known:
            return _allreduce_hook(graph._through, bucket, in_pass=not first)
        future = _BUCKET_FUTURE(devices=[*devices_of(bucket.buffer())])
        graph._collected.append((bucket, future))
        if bucket.is_last():
            collected, graph._collected = graph._collected, []
            graph._reduce_pieces(collected)
        return future

    def _note(self, param: torch.Tensor) -> None:
        # If several backward passes reach a parameter, its last arrival counts.
        self._arrived.pop(param, None)
        self._arrived[param] = None

    def _work_out_pieces(self) -> None:
        for handle in self._noting:
            handle.remove()
        parameters, expect_sparse = self._ddp._build_params_for_reducer()
        unused = [p for p in parameters if p not in self._arrived]  # the reducer puts these first
        ordered = unused + list(self._arrived)
        sparse = dict(zip(parameters, expect_sparse))
        config = getattr(self._ddp, "_bucket_config", None)  # older releases have a constant instead
        first_bytes = config.first_bucket_bytes_cap if config is not None else dist._DEFAULT_FIRST_BUCKET_BYTES
        indices, _ = dist._compute_bucket_assignment_by_size(
            ordered,
            [first_bytes, self._ddp.bucket_bytes_cap],
            [sparse[p] for p in ordered],
            list(range(len(ordered))),
        )
        self._pieces = [[ordered[i] for i in piece] for piece in indices]
        self._known = {_key(piece) for piece in self._pieces}
        self._arrived = {}

    def _reduce_pieces(self, collected: List[Tuple[dist.GradBucket, _BUCKET_FUTURE]]) -> None:
        self._through.extras.refuse_replay("the first passes over a static graph reduce copies of the gradients")
        grads: Dict[torch.Tensor, torch.Tensor] = {}
        for bucket, _ in collected:
            grads.update(zip(bucket.parameters(), bucket.gradients()))
        flats = [torch.cat([grads[p].reshape(-1) for p in piece]) for piece in self._pieces]
        for work in [self._through.allreduce(flat) for flat in flats]:
            work.wait()
        for piece, flat in zip(self._pieces, flats):
            for param, part in zip(piece, flat.split([p.numel() for p in piece])):
                grads[param].copy_(part.view_as(grads[param]))
        for bucket, future in collected:
            future.set_result(bucket.buffer())


def _key(params: Iterable[torch.Tensor]) -> Tuple[int, ...]:
    return tuple(id(p) for p in params)


class PureDistributedDataParallel(nn.Module):
    """Averages each parameter's gradient with a separate allreduce, without PyTorch's reducer.

    Simple, and slow for small parameters.

    The allreduce of a gradient begins as soon as the gradient is final, and the end of the backward pass waits for all
    of them. Groups must produce their gradients in the same order.

    Args:
        manager: the Manager of this rank.
        module: the model.
    """

    def __init__(self, manager: "Manager", module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Parameters, which own the hooks below, are C++ objects like the reducer: see `_of_weak`.
        self._manager_ref = weakref.ref(manager)
        self._works: Optional[List[dist._Work]] = None  # works of the backward pass in progress
        self._syncs = True
        extras_of(manager).register_parameters(module.named_parameters)
        for param in module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._reduce)

    @property
    def _manager(self) -> "Manager":
        manager = self._manager_ref()
        if manager is None:
            raise RuntimeError("PureDistributedDataParallel: its Manager no longer exists; keep a reference to it")
        return manager

    def _reduce(self, param: torch.Tensor) -> None:
        if param.grad is None or not self._syncs:
            return
        if self._works is None:
            self._works = []
            Variable._execution_engine.queue_callback(self._wait)
        self._works.append(managed(self._manager, self._manager.allreduce(param.grad), param.grad))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in PyTorch: backward passes in this context add to the gradients; the first later one reduces the sum.

        Unlike in PyTorch, that pass must use all parameters that the passes before have used: a gradient to which it
        adds nothing is not reduced.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _wait(self) -> None:
        works, self._works = self._works, None
        for work in works or []:
            work.wait()

    def forward(self, *args: object) -> object:
        self._works = None  # works left by a backward pass that raised an error
        return self.module(*args)
