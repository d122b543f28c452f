"""Counts the samples of LocalSGD and DiLoCo whose inner steps are in a committed average. Pure, without
torch.

Between two averages the groups divide each batch as in their last quorum, and do not communicate. So a sample
is lost if the group that trained on it fails, or the average fails. Lost samples are counted, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional


@dataclass
class Account:
    """The samples of one data rank over all groups. Except ``own``, it is equal in all groups that are up to
    date.

    Attributes:
        committed: number of samples in the weights that the groups share.
        lost: number of samples of past batches that are not in these weights.
        open: number of samples of batches since the last average that was committed, or that failed and
            restored the weights.
        own: number of open samples that this rank has trained on and that are in its weights.
    """

    committed: int = 0
    lost: int = 0
    open: int = 0
    own: int = 0
    _sent: Optional[tuple[int, int]] = None

    def trained(self, own: int, expected: int) -> None:
        """Adds an inner step.

        Args:
            own: samples that this rank trained on.
            expected: samples of the batch over all groups.
        """
        self.own += own
        self.open += expected

    def send(self) -> int:
        """Begins an average. Returns the samples that this rank contributes to it."""
        self._sent = self.open, self.own
        return self.own

    def averaged(self, counted: int) -> None:
        """Commits an average that contains this many samples."""
        assert self._sent is not None
        open_, own = self._sent
        self.committed += counted
        self.lost += open_ - counted
        self.open -= open_
        self.own -= own
        self._sent = None

    def failed(self, kept: bool) -> None:
        """Ends an average without a commit.

        Args:
            kept: whether each group continues with its own weights, which are in the next average.
        """
        self._sent = None
        if not kept:
            self.lost += self.open
            self.open = self.own = 0

    def save(self) -> dict[str, int]:
        return {"committed": self.committed, "lost": self.lost, "open": self.open}

    def load(self, state: Mapping[str, int]) -> None:
        """Takes over a peer's account with its weights, which contain none of this rank's own samples."""
        self.committed, self.lost, self.open = state["committed"], state["lost"], state["open"]
        self.own = 0
        if self._sent is not None:
            self._sent = self.open, 0

    def __str__(self) -> str:
        return f"{self.committed} samples committed, {self.lost} lost"
