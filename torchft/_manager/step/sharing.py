"""Which optimizers share a step of the Manager. Pure code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


class SharedStep:
    """The optimizers of one step: those that begin before anything is reduced, and step after all of it.

    Without sharing each of them has a quorum and a vote. A group that joins between two requests of the
    others would be one behind; and the second vote is on a step of which the lighthouse was not asked.

    All groups call the same functions in the same order, and decide alike: an error of one group changes
    nothing here.
    """

    def __init__(self) -> None:
        self._begun: list[Optimizer] = []
        self._ended: list[Optimizer] = []
        self._reduced = False  # since the step has begun, or was decided on

    def reduces(self) -> None:
        """A reduction is called, whether or not it can begin."""
        self._reduced = True

    def begins(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer joins others in a step."""
        return bool(self._begun) and not self._ended and not self._reduced and optimizer not in self._begun

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer has begun the step, alone or with others."""
        self._begun.append(optimizer)

    def ends(self, optimizer: Optimizer) -> bool:
        """Whether the decision on the step holds for this optimizer, too."""
        decided = bool(self._ended) and not self._reduced and optimizer not in self._ended
        return decided and all(one in self._begun for one in (optimizer, *self._ended))

    def end(self, optimizer: Optimizer) -> None:
        """The step was decided on for an optimizer."""
        self._ended.append(optimizer)
        self._reduced = False
