"""Decides from which source the next piece of a state is requested. Pure code.

A quorum names one group that is up to date as the assigned source, and others as additional sources. The pieces come
from all of them in turn. Data that must come from a single group (hyperparameters, digests, the rest of the state)
come from the assigned source. If a source fails to send a piece, the piece is requested from another source at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

# A source is left out, or the heal ends, once this many consecutive requests have failed.
MAX_FAILURES = 8
# Pause in seconds after the first failure; it doubles with each further one, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 2.0


@dataclass
class _Record:
    failures: int = 0  # number of consecutive failures
    again_at: float = 0.0  # the end of its pause, in seconds of the caller's clock
    turn: int = 0  # value of the request counter at its last request for a piece
    dropped: bool = False  # no further pieces are requested from it in this heal


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
        """Takes over the sources of a new quorum.

        A source that was named before keeps its record. The assigned source may be asked at once.
        """
        if assigned != self.assigned:
            self._records.pop(assigned, None)  # its failures as an additional source do not count
        self.assigned = assigned
        self._records = {one: self._records.get(one, _Record()) for one in (assigned, *additional)}
        self._records[assigned].again_at = 0.0

    def __contains__(self, source: str) -> bool:
        return source in self._records

    def pick(self, any_source: bool, now: float) -> Optional[str]:
        """Returns the source to ask now, or None if all have to pause; see :meth:`pause`.

        Args:
            any_source: whether additional sources may be asked too.
            now: in seconds, of any monotonic clock.
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
        """Seconds until the first pause of these sources ends, so that :meth:`pick` returns one."""
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
            whether the heal can go on. After too many failures in a row of the assigned source it cannot; an additional
            source is dropped after as many.
        """
        record = self._records[source]
        record.failures += 1
        record.again_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (record.failures - 1))
        return record.failures < MAX_FAILURES or self.drop(source)

    def drop(self, source: str) -> bool:
        """Requests nothing more from a source, because it refuses or its state differs.

        Returns:
            whether the heal can go on: it cannot without the assigned source.
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
