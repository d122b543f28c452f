"""FTLib's ``initialized`` flag, which shows whether the communicator may be used, as a pure state machine.

Three events reset it: a member joins, a collective fails (a timeout is a failure), a member fails. A join
during a collective or a rebuild takes effect at its end; a rebuild then has to be repeated, because its list
of members may be older than the join. The failure of a member takes effect at once, because the collective
cannot succeed any more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class FlagEvent(Enum):
    """The events that change the flag."""

    REBUILDING = "rebuilding"  # a rebuild begins, before the list of members is requested
    REBUILT = "rebuilt"
    BEGUN = "begun"  # a collective begins
    ENDED = "ended"
    FAILED = "failed"  # a collective or a rebuild failed
    JOINED = "joined"
    MEMBER_FAILED = "member failed"


@dataclass(frozen=True)
class Flag:
    """
    Attributes:
        initialized: whether the communicator connects all members of the last list.
        busy: whether a collective or a rebuild runs.
        pending: whether a member joined while the flag is busy, or failed during a rebuild.
    """

    initialized: bool = False
    busy: bool = False
    pending: bool = False

    def after(self, event: FlagEvent) -> Flag:
        """Returns the flag after an event."""
        if event is FlagEvent.REBUILDING:
            return Flag(busy=True)
        if event is FlagEvent.BEGUN:
            return replace(self, busy=True)
        if event is FlagEvent.FAILED:
            return Flag()
        if event is FlagEvent.ENDED:
            return Flag(self.initialized and not self.pending)
        if event is FlagEvent.REBUILT:
            return Flag(not self.pending)
        if self.busy:
            return replace(self, initialized=self.initialized and event is FlagEvent.JOINED, pending=True)
        return Flag()
