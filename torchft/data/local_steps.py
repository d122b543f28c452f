"""Which samples of LocalSGD and DiLoCo count: those of inner steps whose average is committed. Pure, and free of torch.

Between two averages the groups divide each batch as in their last quorum, and do not communicate. So a sample may be
lost with the group that trained on it, or with an average that fails. Such samples are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional


@dataclass
class Account:
    """Samples of one data rank, over all groups; all groups that are up to date have the same, but for ``own``.

    Attributes:
        committed: are in the weights that the groups share.
        lost: of batches that have passed, and are not in them.
        open: of batches since the last average that was committed, or that put the weights back.
        own: of the open ones, those that this rank has trained on, and whose steps its weights hold.
    """

    committed: int = 0
    lost: int = 0
    open: int = 0
    own: int = 0
    _sent: Optional[tuple[int, int]] = None

    def trained(self, own: int, expected: int) -> None:
        """An inner step has ended.

        Args:
            own: samples that this rank trained on.
            expected: those of the batch that the groups together should have.
        """
        self.own += own
        self.open += expected

    def send(self) -> int:
        """An average begins; gives what this rank adds to the sum of samples in it."""
        self._sent = self.open, self.own
        return self.own

    def averaged(self, counted: int) -> None:
        """The average is committed, with so many samples in it."""
        assert self._sent is not None
        open_, own = self._sent
        self.committed += counted
        self.lost += open_ - counted
        self.open -= open_
        self.own -= own
        self._sent = None

    def failed(self, kept: bool) -> None:
        """The average is not committed.

        Args:
            kept: whether each group goes on with its own weights, which are in the next average.
        """
        self._sent = None
        if not kept:
            self.lost += self.open
            self.open = self.own = 0

    def save(self) -> dict[str, int]:
        return {"committed": self.committed, "lost": self.lost, "open": self.open}

    def load(self, state: Mapping[str, int]) -> None:
        """Takes over that of a peer, together with its weights: what this rank trained on by itself is in none."""
        self.committed, self.lost, self.open = state["committed"], state["lost"], state["open"]
        self.own = 0
        if self._sent is not None:
            self._sent = self.open, 0

    def __str__(self) -> str:
        return f"{self.committed} samples committed, {self.lost} lost"
