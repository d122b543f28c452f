"""The states of a stream's sources, for datasets that have some: with its state, a source is opened where it
was, and not read from its begin.

A dataset has a state if it has ``state_dict`` and ``load_state_dict``. One with ``skip`` is asked to skip
instead: a state of Hugging Face's datasets leaves out the samples of a shuffle buffer. For a DataLoader, as
torchdata's StatefulDataLoader, both holds of its dataset, too: torchdata 0.11 would otherwise skip by reading
itself, and a state of its worker processes after that counts the skipped samples twice.

States are kept as bytes. They come from peers, too, so only plain values are made of them
(:mod:`torchft.checkpointing._serialization`); a state with anything else is left alone, and its source read.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import torch

from torchft.checkpointing._serialization import allow_checkpoint_types


class NotLoaded(ValueError):
    """A state is not made of plain values."""


class Saved(NamedTuple):
    """The state of a source.

    Attributes:
        epoch: its epoch.
        source: number of the source.
        block: the block that it gives next.
        state: of the dataset, see :func:`save`.
    """

    epoch: int
    source: int
    block: int
    state: bytes


class SourceStates:
    """The states that a rank has: of each source the last one before its position, and a later one, which is
    of a step that may be lost.
    """

    def __init__(self) -> None:
        self._of: dict[int, list[Saved]] = {}

    def put(self, saved: Saved, epoch: int, first: int) -> None:
        """Adds a state.

        Args:
            saved: the state.
            epoch, first: the position of this rank, as epoch and first block of a source.
        """
        before = self.before(epoch, saved.source, first)
        self._of[saved.source] = [saved] if before is None else [before, saved]

    def before(self, epoch: int, source: int, block: int) -> Optional[Saved]:
        """The last state of a source from which a block can be read."""
        usable = [s for s in self._of.get(source, ()) if s.epoch == epoch and s.block <= block]
        return max(usable, default=None)

    def save(self, epoch: int, first: int) -> list[tuple[int, int, bytes]]:
        """Source, block and state of all that are usable at a position."""
        states = (self.before(epoch, source, first) for source in sorted(self._of))
        return [saved[1:] for saved in states if saved is not None]

    def load(self, epoch: int, states: Iterable[tuple[int, int, bytes]]) -> None:
        """Takes over what was saved at a position of this epoch."""
        self._of = {source: [Saved(epoch, source, block, state)] for source, block, state in states}


def has_state(data: Any) -> bool:
    """Whether a dataset is opened with its state."""
    return all(
        hasattr(each, "state_dict") and hasattr(each, "load_state_dict") and not hasattr(each, "skip")
        for each in (data, getattr(data, "dataset", data))
    )


def save(state: Any) -> bytes:
    """A state as bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def load(state: bytes) -> Any:
    """The state of :func:`save`. NotLoaded: it has other than plain values."""
    allow_checkpoint_types()
    try:
        return torch.load(io.BytesIO(state), weights_only=True)
    except Exception as e:
        raise NotLoaded(f"its state cannot be loaded: {e}") from e
