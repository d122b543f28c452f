"""The calls of torchft's wrappers (optimizer, DDP, LocalSGD, process groups) on a Manager, beside its public
methods.

A test may pass a wrapper a stand-in for a Manager, which has the public methods only. So a wrapper calls
:func:`extras_of` once, in its constructor, and makes these calls on the returned object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Extras:
    """The extras for a stand-in of a Manager: most do nothing. A Manager has ``OwnExtras``."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._has_quorum_id = hasattr(manager, "_quorum_id")
        self._share_buffer = getattr(getattr(manager, "_pg", None), "share_buffer", None)

    def refuse_replay(self, reason: str) -> None:
        """Declares that this step does something that cannot be repeated, so that it is not replayed."""

    def register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Registers what an optimizer will read. A step can be replayed only if it reduces all of that."""

    def computes(self) -> None:
        """Reports a forward pass whose gradients this step, or the next one, may reduce."""

    def reduces_gradients(self) -> Callable[[], bool]:
        """Reports that a backward pass reduces gradients.

        Returns:
            Tells whether this step of the Manager is still the last one, and is not committed: an optimizer
            must not apply the gradients then.

        Raises:
            RuntimeError: no step has begun since the last one was decided on.
        """
        return never

    def register_check(self, check: Callable[[], None]) -> None:
        """Registers what raises if gradients of this step were not reduced, so that it is not committed. A
        method keeps no object alive.
        """

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Registers parameters and optimizer state that have the same bits in all groups: they are compared,
        and may be healed in passing.
        """

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins a step for an optimizer, unless another one has begun it for both."""
        self._manager.start_quorum()

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        """Ends the step for an optimizer, unless another one has ended it. Whether it is committed."""
        committed: bool = self._manager.should_commit()
        return committed

    def register_parameters(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """Registers parameters of a model that have the same bits in all groups: they are compared."""

    def check_sparse(self, names: list[str]) -> None:
        """Raises a ValueError if one of these parameters has sparse gradients, which the group refuses."""

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients are summed over the groups: a data loader has weighted the losses."""
        return False

    def steps_by_itself(self, local_steps: Any) -> None:
        """Declares that groups train on their own between two steps of the Manager (LocalSGD, DiLoCo)."""

    def inner_step_ended(self) -> None:
        """Reports a step of the inner optimizer, between two steps of the Manager."""

    @property
    def has_peers(self) -> bool:
        """Whether the process group has peers; True for a stand-in without a quorum id."""
        return not self._has_quorum_id or self._manager._quorum_id != -1

    def share_buffer(self, buffer: torch.Tensor) -> None:
        """Lets an isolated group share a buffer's memory with its worker, so that nothing is copied."""
        if self._share_buffer is not None:
            self._share_buffer(buffer)

    def counted(self, name: str, number: int = 1) -> None:
        """Adds ``number`` to a counter of the manager server; go/manager/counted.go lists them."""


def never() -> bool:
    """Returns False."""
    return False


def extras_of(manager: Any) -> Extras:
    """Returns the extras of a Manager, or those of a stand-in that has none."""
    extras = getattr(manager, "_extras", None)
    return extras if isinstance(extras, Extras) else Extras(manager)
