"""Which optimizers share a step of the Manager. Pure code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class SharedStep:
    """The optimizers of one step: those that begin before anything is reduced, and step after all of it.

    Without sharing each of them has a quorum and a vote. A group that joins between two requests of the
    others would be one behind; and the second vote is on a step of which the lighthouse was not asked.

    All groups call the same functions in the same order, and decide alike: an error of one group changes
    nothing here.

    Attributes:
        begun: the optimizers that have begun the step.
        ended: those for which it was decided on.
        reduced: whether a reduction was called, even if it could not begin, since the step has begun or was
            decided on.
    """

    begun: list[Optimizer] = field(default_factory=list)
    ended: list[Optimizer] = field(default_factory=list)
    reduced: bool = False

    def begins(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer joins others in a step."""
        return bool(self.begun) and not self.ended and not self.reduced and optimizer not in self.begun

    def ends(self, optimizer: Optimizer) -> bool:
        """Whether the decision on the step holds for this optimizer, too."""
        decided = bool(self.ended) and not self.reduced and optimizer not in self.ended
        return decided and all(one in self.begun for one in (optimizer, *self.ended))
