"""Data parallel wrappers that average gradients over the participants of a step."""

# No `from __future__ import annotations`: PyTorch compares the annotations of communication hooks with types.

import weakref
from collections import deque
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Deque, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn import parallel

from torchft._copies import Copyable, Missing
from torchft._extras import extras_of, never
from torchft._manager.step.work import _ManagedWork, managed
from torchft._unvoted import watch
from torchft.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from typing_extensions import Self

    from torchft.manager import Manager

_BUCKET_FUTURE = torch.futures.Future[torch.Tensor]


class _FixedBuckets(ProcessGroupDummy):
    """PyTorch's group for DDP, of one rank, so that DDP's own broadcasts and reductions stay in this process.

    A reducer rebuilds its buckets once, and asks rank 0 of its group for them. This group has an answer of
    its own.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._answers: Deque[List[int]] = deque()

    def rebuild(self, reducer: dist.Reducer, buckets: List[List[int]]) -> None:
        """Makes a new reducer rebuild its buckets now, as these lists of parameter indices, and only now."""
        self._answers.extend([[*chain(*buckets), len(buckets)], [len(bucket) for bucket in buckets]])
        reducer._push_all_rebuilt_params()
        if not reducer._rebuild_buckets() or self._answers:
            raise RuntimeError(
                f"PyTorch {torch.__version__}: the buckets of DistributedDataParallel cannot be fixed"
            )

    def getSize(self) -> int:
        return 1

    def broadcast(self, tensor_list: List[torch.Tensor], opts: object) -> dist.Work:
        if self._answers:
            tensor_list[0].copy_(torch.tensor(self._answers.popleft()))
        return super().broadcast(tensor_list, opts)


class DistributedDataParallel(Copyable, parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel, whose allreduces go through a Manager.

    The allreduce of a bucket overlaps with the rest of the backward pass: only the first one of a step
    blocks, until there is a quorum. If a peer fails, backward raises no error; the step is not committed.

    All groups must cut the gradients into the same buckets in the same order, including a group that joins
    when the others are at step 1,000. PyTorch rebuilds the buckets after the first step, in the order in
    which gradients arrived, unless ``find_unused_parameters`` is set. Here the buckets are always those that
    PyTorch makes with ``find_unused_parameters``, from the first step on.

    As in PyTorch, parameters that take no part in the loss are an error, unless the caller passes
    ``find_unused_parameters=True``.

    Gradients are views of the buckets (``gradient_as_bucket_view``) unless the caller says otherwise. The
    number of participants is known only after the allreduce, so averaging takes another pass over all
    gradients. In return, the views save the pass that copies the gradients back, and the memory of the copy.
    As PyTorch documents for the option, such a gradient cannot be detached in place, and is overwritten in
    the next backward pass.

    A copy has a copy of the model and the same Manager, which does not compare the copy's parameters. A
    pickle holds no Manager: wrap ``module`` of the unpickled object anew to train with it.

    Args:
        manager: the Manager of this rank.
        module: the model; all groups start from the same weights, or heal to them (``init_sync``).
        kwargs: arguments of PyTorch's class, except ``process_group``.

    Raises:
        ValueError: ``process_group`` was given, or the Manager's group does not reduce the sparse gradients
            of a layer.
    """

    _awaits_commit = staticmethod(never)
    _of_this_process = ("_manager", "_extras")
    _remedy = "wrap its attribute `module` anew"

    def __init__(self, manager: "Manager", module: nn.Module, **kwargs: Any) -> None:
        if "process_group" in kwargs:
            raise ValueError(
                "process_group is not allowed: the Manager selects the participants of each step"
            )
        kwargs.setdefault("gradient_as_bucket_view", True)
        super().__init__(module, process_group=_FixedBuckets(), **kwargs)
        self._manager = manager
        self._extras = extras_of(manager)
        ignored = set(self.parameters_to_ignore)
        self._extras.check_sparse([name for name in _with_sparse_gradients(module) if name not in ignored])
        self._register_hook()
        # PyTorch does so in the next forward pass, which is too late for this step.
        self._extras.register_check(self._check_reducer_finalized)
        self._extras.register_parameters(
            lambda: [p for p in module.named_parameters() if p[0] not in ignored]
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._extras.computes()
        return super().forward(*inputs, **kwargs)

    def _register_hook(self) -> None:
        # The reducer, which owns the hook, is C++ code whose references the garbage collector does not see: a
        # Manager whose state functions refer to the model would never be collected.
        reduce = weakref.WeakMethod(self._reduce)

        def hook(_: object, bucket: dist.GradBucket) -> _BUCKET_FUTURE:
            method = reduce()
            assert method is not None  # the backward pass is this model's
            return method(bucket)

        self.register_comm_hook(None, hook)
        watch(self)
        # In its first pass, PyTorch calls the hook after the pass.
        self._reduces_in_pass = not self.static_graph

    def _reduce(self, bucket: dist.GradBucket) -> _BUCKET_FUTURE:
        self._awaits_commit = self._extras.reduces_gradients()
        if not self.gradient_as_bucket_view and not self._extras.adds_gradients:
            self._extras.refuse_replay(
                "gradients are copies of what is reduced (gradient_as_bucket_view=False)"
            )
        buffer = bucket.buffer()
        # The buffer belongs to DDP; gradients are views of it, and move with it.
        self._extras.share_buffer(buffer)
        work = managed(self._manager, self._manager.allreduce(buffer), buffer)
        # The reducer waits for the future, without a deadline and deaf to signals. The future may complete
        # only in a wait for the work, so that comes first: at the end of the backward pass, before the
        # reducer's own.
        if self._reduces_in_pass:
            Variable._execution_engine.queue_callback(work.wait)  # type: ignore[arg-type]
        else:
            work.wait()
            self._reduces_in_pass = bucket.is_last()
        future = work.future_of_wait() if isinstance(work, _ManagedWork) else work.get_future()
        return future  # type: ignore[return-value]

    def _ddp_init_helper(  # type: ignore[override]
        self, parameters: List[torch.Tensor], expect_sparse_gradient: List[bool], *rest: Any
    ) -> None:
        super()._ddp_init_helper(parameters, expect_sparse_gradient, *rest)
        if not self.find_unused_parameters:  # else they would not be rebuilt
            self._fix_buckets(parameters, expect_sparse_gradient)

    def _set_static_graph(self) -> None:
        super()._set_static_graph()
        self._reduces_in_pass = False
        if self.find_unused_parameters:
            self._fix_buckets(*self._build_params_for_reducer())

    def _fix_buckets(self, parameters: List[torch.Tensor], expect_sparse_gradient: List[bool]) -> None:
        config = getattr(self, "_bucket_config", None)
        if config is not None:
            limits, _ = config.compute_bucket_size_limits(static_graph=False, find_unused_parameters=True)
        else:  # older releases
            small_first = [dist._DEFAULT_FIRST_BUCKET_BYTES] if self.bucket_bytes_cap_default else []
            limits = [*small_first, self.bucket_bytes_cap]
        buckets, _ = dist._compute_bucket_assignment_by_size(parameters, limits, expect_sparse_gradient)
        group = self.process_group
        assert isinstance(group, _FixedBuckets)
        group.rebuild(self.reducer, buckets[::-1])

    @contextmanager
    def join(self, *args: Any, **kwargs: Any) -> Iterator[None]:  # type: ignore[override]
        """Does nothing. In PyTorch, ranks without further input wait here for the others; with a Manager, the
        others go on without a group that has ended.
        """
        yield

    def _parts(self) -> Dict[str, Any]:
        """The attributes that PyTorch's class pickles."""
        new = ("process_group", "reducer", "logger", "_comm_hooks", "_awaits_commit")
        return {name: value for name, value in self.__dict__.items() if name not in new}

    def _assemble(self, parts: Dict[str, Any]) -> None:
        new = {"process_group": _FixedBuckets(), "_comm_hooks": [], "static_graph": False}
        nn.Module.__setstate__(self, {**parts, **new})
        parameters, expect_sparse_gradient = self._build_params_for_reducer()
        names = self._build_debug_param_to_name_mapping(parameters)
        self._ddp_init_helper(parameters, expect_sparse_gradient, names, parts["static_graph"])
        if parts["static_graph"]:
            self._set_static_graph()
        if isinstance(self._manager, Missing):
            self._manager.refuse_training(self)
        else:
            self._register_hook()


def _with_sparse_gradients(model: nn.Module) -> List[str]:
    """The names of the parameters that PyTorch expects to have sparse gradients."""
    return [
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        and module.sparse
        and module.weight.requires_grad
    ]


class PureDistributedDataParallel(Copyable, nn.Module):
    """Averages each parameter's gradient with a separate allreduce, without PyTorch's reducer.

    Simple, and slow for small parameters.

    The allreduce of a gradient begins as soon as the gradient is final, and the end of the backward pass
    waits for all of them. Groups must produce their gradients in the same order.

    Copies and pickles are as those of :class:`DistributedDataParallel`.

    Args:
        manager: the Manager of this rank.
        module: the model.
    """

    _awaits_commit = staticmethod(never)
    _of_this_process = ("_manager_ref",)
    _remedy = "wrap its attribute `module` anew"

    def __init__(self, manager: "Manager", module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # Parameters, which own the hooks, are C++ objects like the reducer of DistributedDataParallel.
        self._manager_ref = weakref.ref(manager)
        self._works: Optional[List[dist._Work]] = None  # works of the backward pass in progress
        self._syncs = True
        extras = extras_of(manager)
        extras.check_sparse(_with_sparse_gradients(module))
        extras.register_parameters(module.named_parameters)
        self._register_hooks()

    def _register_hooks(self) -> None:
        watch(self)
        for param in self.module.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self._reduce)

    def _parts(self) -> Dict[str, Any]:
        parts = {**self.__dict__, "_works": None}
        parts.pop("_awaits_commit", None)
        return parts

    def _assemble(self, parts: Dict[str, Any]) -> None:
        super().__setstate__(parts)
        if isinstance(self._manager_ref, Missing):
            self._manager_ref.refuse_training(self)
        else:
            self._register_hooks()

    def __copy__(self) -> "Self":
        made = type(self).__new__(type(self))
        nn.Module.__setstate__(made, self._parts())  # the shared parameters have their hooks
        return made

    @property
    def _manager(self) -> "Manager":
        manager = self._manager_ref()
        if manager is None:
            raise RuntimeError(
                "PureDistributedDataParallel: its Manager no longer exists; keep a reference to it"
            )
        return manager

    def _reduce(self, param: torch.Tensor) -> None:
        if param.grad is None or not self._syncs:
            return
        if self._works is None:
            self._works = []
            self._awaits_commit = extras_of(self._manager).reduces_gradients()
            Variable._execution_engine.queue_callback(self._wait)
        self._works.append(managed(self._manager, self._manager.allreduce(param.grad), param.grad))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in PyTorch: backward passes in this context add to the gradients; the first later one reduces
        the sum.

        Unlike in PyTorch, that pass must use all parameters that the passes before have used: a gradient to
        which it adds nothing is not reduced.
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
        if torch.is_grad_enabled() and (manager := self._manager_ref()) is not None:
            extras_of(manager).computes()
        return self.module(*args)
