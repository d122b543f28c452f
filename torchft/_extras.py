"""The calls of torchft's wrappers (optimizer, DDP, LocalSGD, process groups) on a Manager beyond its public methods.

Scripts' tests give the wrappers stand-ins for a Manager, which need not have it. A wrapper asks once, when it is made,
for the extras of its Manager, and calls those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Extras:
    """The extras of a stand-in: most of them do nothing. A Manager's own are in ``_manager/extras.py``.

    Args:
        manager: the stand-in.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._tells_quorum = hasattr(manager, "_quorum_id")
        self._share_buffer = getattr(getattr(manager, "_pg", None), "share_buffer", None)

    def refuse_replay(self, reason: str) -> None:
        """This step does something that cannot be done again."""

    def register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        """The tensors that an optimizer will read: a replay must reach all of them."""

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its parameters and its state of them have the same bits in all groups: compared, and healed in pieces."""

    def register_parameters(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """The parameters of a model, which have the same bits in all groups: compared."""

    @property
    def adds_gradients(self) -> bool:
        """Whether gradients are added up over the groups, and not averaged: a data loader has weighted the losses."""
        return False

    def steps_by_itself(self, local_steps: Any) -> None:
        """Groups train on their own between two steps of the Manager."""

    def inner_step_ended(self) -> None:
        """Those of :meth:`steps_by_itself` have done a step of their optimizer."""

    @property
    def had_quorum(self) -> bool:
        """Whether the process group has had peers; that of a stand-in without this method always has."""
        return not self._tells_quorum or self._manager._quorum_id != -1

    def share_buffer(self, buffer: torch.Tensor) -> None:
        """Lets an isolated group share the memory of a buffer with its worker, so that nothing is copied."""
        if self._share_buffer is not None:
            self._share_buffer(buffer)

    def counted(self, name: str, number: int = 1) -> None:
        """The manager server counts it: ``Counters`` in go/rankclient/counted.go has the names."""


def extras_of(manager: Any) -> Extras:
    """The calls of a wrapper beside the public methods of its Manager; obtained when the wrapper is made."""
    extras = getattr(manager, "_extras", None)
    return extras if isinstance(extras, Extras) else Extras(manager)
