"""One fragment of a model: DiLoCo's last global parameters, the values that a group sends, and the outer
step.

Memory on the model's device, for a fragment of size F: none between two synchronizations (the backup is on
``backup_device``); F from the start of a synchronization to its end, in place of the gradients if start and
end are in the same inner step; another F during the outer step if ``alpha`` is not 0.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Iterator, Optional

import torch
import torch.distributed as dist
from torch import nn, optim

from torchft._manager.checks.layout import describe
from torchft._manager.step.work import managed
from torchft._quantization.layout import check_tensors
from torchft.checkpointing.codec.layout import local_part
from torchft.local_sgd import buckets
from torchft.local_sgd.buckets import Buffers
from torchft.local_sgd.parameters import (
    all_finite,
    as_gradient_of,
    extract_local_tensor,
    synchronized,
)

if TYPE_CHECKING:
    from torchft.manager import Manager


class Fragment:
    """A part of the model that is synchronized at once. For the arguments see :class:`DiLoCo`.

    `free_gradients`: whether the start of a synchronization frees the gradients, which are then not needed.

    Attributes:
        refused: the reason if a peer's state could not be loaded because it is of another model; else None.

    Raises:
        ValueError: there are no parameters, or some cannot be sent in the requested way.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        outer_optimizer: optim.Optimizer,
        manager: Manager,
        *,
        backup_device: torch.device,
        pin_memory: bool,
        bucket_bytes: Optional[int],
        should_quantize: bool,
        free_gradients: bool,
        alpha: float,
    ) -> None:
        self.name = name
        self.parameters = synchronized(module, name)
        if should_quantize:
            for n, p in self.parameters.items():
                check_tensors(f"{name}: parameter {n!r}", [local_part(p)])
        self.refused: Optional[ValueError] = None
        self._outer = outer_optimizer
        self._manager = manager
        self._bucket_bytes = bucket_bytes
        self._should_quantize = should_quantize
        self._free_gradients = free_gradients
        self._alpha = alpha
        # The parameters of the last synchronization, equal in all groups, by name; of a DTensor the shard.
        self._global = {
            n: _backup(local_part(p), backup_device, pin_memory) for n, p in self.parameters.items()
        }
        self._buffers: Optional[Buffers] = None
        self._works: list[dist._Work] = []

    def layout(self) -> list[str]:
        """A line for each parameter, equal in all groups that fit together."""
        return [f"{name} {describe(p)}" for name, p in self.parameters.items()]

    # A synchronization: `start`, `wait`, then `commit` or `abort`

    @torch.no_grad()
    def start(self) -> None:
        """Begins to average the pseudogradients: this group's changes since the last synchronization."""
        if self._free_gradients:
            self._drop_gradients()
        locals_ = [local_part(p) for p in self.parameters.values()]
        self._buffers = buckets.allocate(locals_, self._bucket_bytes)
        for sent, last, now in zip(self._buffers.views, self._global.values(), locals_):
            sent.copy_(last, non_blocking=True)
            sent.sub_(now)
        self._works = [
            managed(
                self._manager, self._manager.allreduce(piece, should_quantize=self._should_quantize), piece
            )
            for piece in self._buffers.pieces
        ]

    def wait(self) -> None:
        """Waits until the average has arrived or failed. The Manager keeps the error."""
        for work in self._works:
            work.wait()
        self._works = []

    def nonfinite(self) -> Optional[str]:
        """A warning if the average has NaN or Inf. To be called between :meth:`wait` and :meth:`commit`."""
        assert self._buffers is not None
        if all_finite(self._buffers.pieces):
            return None
        # The average has overwritten the sent values, but those were the difference of this group's own
        # parameters and the global ones. Unless all groups were warned before, the global ones are finite; so
        # the own ones show whether the sent values were.
        own = all_finite(local_part(p) for p in self.parameters.values())
        sent = "finite" if own else "not"
        return f"{self.name}: the average holds NaN or Inf; what this group sent was {sent}"

    def commit(self) -> None:
        """Applies the outer step, which makes the next global parameters from the last ones and the average.
        The group continues with them.

        Raises:
            Exception: whatever the outer optimizer raises. The fragment then has the last global parameters.
        """
        assert self._buffers is not None
        own = [extract_local_tensor(p) for p in self.parameters.values()] if self._alpha else None
        self.restore()
        try:
            with _only_gradients_of(self._outer, self.parameters.values()):
                for parameter, average in zip(self.parameters.values(), self._buffers.views):
                    if parameter.requires_grad:
                        parameter.grad = as_gradient_of(parameter, average)
                self._outer.step()
        except BaseException:
            self.abort()
            raise
        with torch.no_grad():
            for last, parameter in zip(self._global.values(), self.parameters.values()):
                last.copy_(local_part(parameter))
            if own is not None:
                for parameter, mine in zip(self.parameters.values(), own):
                    local_part(parameter).lerp_(mine, self._alpha)
        self._end()

    def abort(self) -> None:
        """Aborts this synchronization: the fragment gets the last global parameters."""
        self.restore()
        self._end()

    @torch.no_grad()
    def restore(self) -> None:
        """Copies the last global parameters into the model."""
        for parameter, last in zip(self.parameters.values(), self._global.values()):
            local_part(parameter).copy_(last, non_blocking=True)

    def _end(self) -> None:
        self._drop_gradients()
        self._buffers = None
        self._works = []

    def _drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    # State for a joining group

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer's state, and the last global parameters by name (for a DTensor, the local
        shard).

        The tensors are the fragment's own, not copies.
        """
        return {"outer_optimizer": self._outer.state_dict(), "original_parameters": dict(self._global)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a peer's :meth:`state_dict`. The model's own parameters come with the user's state.

        Raises:
            ValueError: the peer's fragment has other parameters; nothing is changed then.
        """
        theirs = state["original_parameters"]
        differences = _differences(self._global, theirs)
        if differences:
            self.refused = ValueError(
                f"{self.name} differs from that of the group to heal from: {differences}"
            )
            raise self.refused
        self.refused = None
        for name, last in self._global.items():
            last.copy_(local_part(theirs[name]))
        self._outer.load_state_dict(state["outer_optimizer"])


def _backup(t: torch.Tensor, device: torch.device, pin_memory: bool) -> torch.Tensor:
    # Pinned memory makes copies from and to a device asynchronous; for a model on the CPU it has no use.
    pinned = pin_memory and device.type == "cpu" and t.device.type != "cpu"
    return torch.empty(t.shape, dtype=t.dtype, device=device, pin_memory=pinned).copy_(t)


def _differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """Describes the differences between two fragments; empty if there are none."""
    found = []
    if missing := sorted(ours.keys() - theirs.keys()):
        found.append(f"it lacks {missing}")
    if unknown := sorted(theirs.keys() - ours.keys()):
        found.append(f"it also has {unknown}")
    for name in ours.keys() & theirs.keys():
        mine, other = describe(ours[name]), describe(theirs[name])
        if mine != other:
            found.append(f"{name!r} is {mine} here and {other} there")
    return "; ".join(found)


@contextlib.contextmanager
def _only_gradients_of(optimizer: optim.Optimizer, parameters: Any) -> Iterator[None]:
    """Hides the gradients of all other parameters, which belong to inner steps, from the outer optimizer."""
    mine = {id(p) for p in parameters}
    others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in mine]
    gradients = [p.grad for p in others]
    for p in others:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(others, gradients):
            p.grad = gradient
