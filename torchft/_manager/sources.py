"""Which source gives the next part of a state that arrives in pieces: pure.

A quorum names one group that is up to date as the assigned source, and others as additional ones. Pieces come from all
of them in turn, so that each of them serves a part; what must be of one group (hyperparameters, digests, the rest of
the state) comes from the assigned source. A piece whose source fails is asked for at another one, at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

# Requests in a row that may fail.
MAX_FAILURES = 8
# Seconds after the first of them, doubled after each further one, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 2.0


@dataclass
class _Record:
    failures: int = 0  # in a row
    again_at: float = 0.0  # in seconds
    turn: int = 0  # in which it was asked for a piece last
    dropped: bool = False  # it is not asked for pieces in this heal


class Sources:
    """The sources of one heal.

    Attributes:
        assigned: the address of the assigned source; "" before the first quorum.
    """

    def __init__(self) -> None:
        self.assigned = ""
        self._records: dict[str, _Record] = {}
        self._turn = 0

    def quorum(self, assigned: str, additional: Sequence[str]) -> None:
        """A quorum names its sources. One that is named again keeps its record; the assigned one's pause ends."""
        if assigned != self.assigned:
            self._records.pop(assigned, None)  # what it did as an additional source is no reason to leave it out
        self.assigned = assigned
        self._records = {one: self._records.get(one, _Record()) for one in (assigned, *additional)}
        self._records[assigned].again_at = 0.0

    def __contains__(self, source: str) -> bool:
        return source in self._records

    def pick(self, any_source: bool, now: float) -> Optional[str]:
        """Which source to ask now; None: none before :meth:`pause` has passed.

        Args:
            any_source: whether another one than the assigned will do.
            now: in seconds, of any clock.
        """
        ready = [source for source, record in self._usable(any_source).items() if record.again_at <= now]
        if not ready:
            return None
        source = min(ready, key=lambda one: self._records[one].turn)
        if any_source:
            self._turn += 1
            self._records[source].turn = self._turn
        return source

    def pause(self, any_source: bool, now: float) -> float:
        """Seconds until :meth:`pick` has a source."""
        times = (record.again_at for record in self._usable(any_source).values())
        return max(0.0, min(times, default=now) - now)

    def _usable(self, any_source: bool) -> dict[str, _Record]:
        """The sources that may be asked, now or after a pause."""
        return {
            source: record
            for source, record in self._records.items()
            if (source == self.assigned or any_source) and not record.dropped
        }

    def answered(self, source: str) -> None:
        """A source has answered a request."""
        if source in self:
            self._records[source].failures = 0

    def failed(self, source: str, now: float) -> bool:
        """A request to a source has failed.

        Returns:
            whether the heal can go on: the assigned source has not failed too often. An additional one that has is left
            out.
        """
        record = self._records[source]
        record.failures += 1
        record.again_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (record.failures - 1))
        return record.failures < MAX_FAILURES or self.drop(source)

    def drop(self, source: str) -> bool:
        """Leaves a source out that refuses, or whose state differs.

        Returns:
            whether the heal can go on: it was not the assigned source.
        """
        if source == self.assigned:
            return False
        if source in self:
            self._records[source].dropped = True
        return True

    @property
    def failing(self) -> bool:
        """Whether the last request to the assigned source has failed."""
        return self.assigned in self and self._records[self.assigned].failures > 0
