"""When an offer copies the caller's tensors, and when it need not: pure.

An offer goes through its phases in their order, and may leave some out. So do its readers: there are none, then some,
then one that reads what is offered by the native core. Nothing goes back.
"""

from __future__ import annotations

from enum import IntEnum


class Phase(IntEnum):
    """Of the caller's tensors, as an offer sees them."""

    UNCHANGED = 0  # for now: the large ones are copied after a delay, or not at all while they are read
    DUE = 1  # about to change: all are copied now
    UNNEEDED = 2  # every receiver has them: nothing is copied but for a reader that has only the copy
    ABORTED = 3  # nothing is copied any more
    CLOSED = 4  # the caller's again: nobody reads them; a copy may be read


class Readers(IntEnum):
    """That an offer has had."""

    NONE = 0
    SOME = 1
    NATIVE = 2  # it reads what is on a device from the copy only


class Copying:
    """The state of an offer.

    Attributes:
        phase: only an event changes it.
        readers: the same.
    """

    def __init__(self) -> None:
        self.phase = Phase.UNCHANGED
        self.readers = Readers.NONE

    # Events

    def read(self, readers: Readers) -> None:
        """A reader has come."""
        self.readers = max(self.readers, readers)

    def due(self) -> None:
        """The tensors are about to change, and there will be readers."""
        self._to(Phase.DUE)

    def unneeded(self) -> None:
        """Every receiver has the state."""
        self._to(Phase.UNNEEDED)

    def abort(self) -> None:
        """The tensors are about to change, and there will be no readers."""
        self._to(Phase.ABORTED)

    def close(self) -> None:
        """No copy is under way; the tensors are the caller's again."""
        self._to(Phase.CLOSED)

    def _to(self, phase: Phase) -> None:
        self.phase = max(self.phase, phase)

    # What is to be done

    @property
    def hurries(self) -> bool:
        """Whether a copy waits for nothing more."""
        return self.phase >= Phase.DUE

    def copies_device(self) -> bool:
        """Whether the copy of what is on a device begins before the delay has passed."""
        return self.hurries or self.readers is Readers.NATIVE

    def copies_host(self) -> bool:
        """Whether the copy of host memory begins, once the delay has passed: readers may make it needless."""
        return self.hurries or self.readers is Readers.NONE

    def starts_device(self) -> bool:
        """Whether a reader that has come may still start a copy of what is on a device."""
        return self.phase < Phase.ABORTED

    def skips(self, on_device: bool) -> bool:
        """Whether a copy ends before its next tensor. A reader that nobody has counted may have only the copy."""
        if self.phase is Phase.UNNEEDED:
            return not (on_device and self.readers is Readers.NATIVE)
        return self.phase > Phase.UNNEEDED

    @property
    def closed(self) -> bool:
        """Whether the tensors are the caller's again."""
        return self.phase is Phase.CLOSED
