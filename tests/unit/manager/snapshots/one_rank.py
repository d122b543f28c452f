"""The snapshots of one rank of a group, without a Manager."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Optional

from torch.distributed import HashStore

from torchft._manager.rank import Position
from torchft._manager.snapshots.copies import Snapshots, State


class Rank:
    """A rank, its state and what it has said.

    Args:
        state: what is copied; a copy is loaded into ``loaded``.
        unchanged: the addresses of tensors that change only when a step ends.
    """

    def __init__(
        self,
        state: dict[str, Any],
        every: Optional[int] = 1,
        store: Optional[HashStore] = None,
        rank: int = 0,
        ranks: int = 1,
        life: int = 0,
        unchanged: Any = (),
        group: str = "group",
        copies: int = 0,
        lighthouse: Optional[str] = None,
    ) -> None:
        self.state = state
        self.said: list[str] = []
        self.loaded: Any = None
        self.obstacle: Optional[str] = None
        settings: Any = SimpleNamespace(
            snapshots=every,
            group_rank=rank,
            group_world_size=ranks,
            timeout=timedelta(seconds=20),
            lighthouse_addr=lighthouse,
            snapshot_copies=copies,
        )
        logger: Any = SimpleNamespace(warn=self.said.append, info=self.said.append)
        self.snapshots = Snapshots(
            settings,
            store or HashStore(),  # type: ignore[arg-type]
            f"{group}:{life}",
            State(lambda: self.state, self._load, lambda: self.state),
            lambda: set(unchanged),
            lambda: self.obstacle,
            lambda: self.said.append("news"),
            logger,
        )
        self.snapshots.agreed = every or 0  # as of a quorum whose groups have the same setting

    def _load(self, state: Any) -> None:
        self.loaded = state

    def restore(self) -> int:
        """Begins alone: loads the newest copy. Returns its step, or 0."""
        self.snapshots.seek(0)
        while self.snapshots.found(Position(0, 0, -1)) is not None:
            position = self.snapshots.load()
            if position is not None:
                return position.step
        return 0

    def begin(self, step: int) -> None:
        self.snapshots.begin(Position(step, 2 * step, 7))

    def step(self, step: int) -> None:
        """A step that is committed."""
        self.begin(step)
        self.snapshots.end()
