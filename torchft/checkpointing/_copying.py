"""Decides when an offer (`_offer.py`: the state of one step, which targets read) copies the caller's tensors. Pure.

Both `Phase` and `Readers` only increase, and may skip values.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """The state of the caller's tensors."""

    UNCHANGED = 0  # for now: large ones are copied after a delay, unless targets read them directly
    DUE = 1  # about to change: all are copied now
    UNNEEDED = 2  # every target has them: they are copied only for a reader that depends on the copy
    ABORTED = 3  # nothing is copied any more
    CLOSED = 4  # the caller may change them: targets read the copy, if there is one and it was complete before


class Readers(IntEnum):
    """The kinds of targets that have read the offer so far."""

    NONE = 0
    SOME = 1
    NATIVE = 2  # through the native core, which reads device tensors from the copy only


class Copying:
    """The state of an offer.

    Attributes:
        phase: the phase; only the events below change it.
        readers: the kinds of readers so far; only the events below change it.
    """

    def __init__(self) -> None:
        self.phase = Phase.UNCHANGED
        self.readers = Readers.NONE

    # Events

    def read(self, readers: Readers) -> None:
        """A target begins to read."""
        self.readers = max(self.readers, readers)

    def due(self) -> None:
        """The tensors are about to change, and readers will follow that need a copy."""
        self._to(Phase.DUE)

    def unneeded(self) -> None:
        """Every target has the state."""
        self._to(Phase.UNNEEDED)

    def abort(self) -> None:
        """The tensors are about to change, and no readers will follow."""
        self._to(Phase.ABORTED)

    def close(self) -> None:
        """The caller may change the tensors. A copy that is still in progress, because it is late, is not used."""
        self._to(Phase.CLOSED)

    def _to(self, phase: Phase) -> None:
        self.phase = max(self.phase, phase)

    # Actions

    @property
    def hurries(self) -> bool:
        """Whether a copy starts without a delay."""
        return self.phase >= Phase.DUE

    def copies_device(self) -> bool:
        """Whether the copy of device tensors begins before the delay has passed."""
        return self.hurries or self.readers is Readers.NATIVE

    def copies_host(self) -> bool:
        """Whether the copy of host memory begins after the delay: not while targets read the tensors directly."""
        return self.hurries or self.readers is Readers.NONE

    def starts_device(self) -> bool:
        """Whether a reader may still start the copy of device tensors."""
        return self.phase < Phase.ABORTED

    def skips(self, on_device: bool) -> bool:
        """Whether a copy in progress stops before its next tensor. Device tensors are still copied for
        a native reader.
        """
        if self.phase is Phase.UNNEEDED:
            return not (on_device and self.readers is Readers.NATIVE)
        return self.phase > Phase.UNNEEDED

    @property
    def closed(self) -> bool:
        """Whether the caller may change the tensors."""
        return self.phase is Phase.CLOSED
