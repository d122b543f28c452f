"""Which step, quorum and state a rank has. The Manager changes them, its parts read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from operator import attrgetter
from typing import Any, NamedTuple, Optional


class Position(NamedTuple):
    """Identifies the state that a group has."""

    step: int
    batches_committed: int
    # The quorum in which the weights were committed: groups that were separated can reach the same step with
    # different weights.
    committed_quorum_id: int


class Activity(NamedTuple):
    """See :meth:`RankState.doing`."""

    what: str
    waits: bool
    phase: str


class RankState:
    """Step, quorum id and timeout of a rank. The Manager changes them; its parts read them.

    Args:
        timeout: limit for collectives, transfers and votes.

    Attributes:
        step: number of the step in progress, which is the number of committed steps.
        quorum_id: number of the quorum for which the process group is configured; -1 before the first.
        timeout: the value of the argument; tests of other projects replace it.
        computed: whether a model has computed something since the last vote.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.step = 0
        self.quorum_id = -1
        self.computed = False
        self._activities: list[Activity] = []

    @contextmanager
    def doing(self, what: str, waits: bool = True, phase: str = "") -> Iterator[None]:
        """Surrounds what may take long, for the lighthouse, which asks a rank that makes no progress what it
        does.

        Args:
            what: in the present tense, without a subject.
            waits: whether it is a wait for other groups, or for the device.
            phase: its phase, as named in the proto, if it is one of its own.
        """
        activity = Activity(what, waits, phase)
        self._activities.append(activity)
        try:
            yield
        finally:
            self._activities.remove(activity)

    def activity(self, waits: bool) -> Optional[Activity]:
        """The first of the activities in progress of that kind."""
        return next((activity for activity in list(self._activities) if activity.waits == waits), None)

    # The same values under the names of the Manager's attributes, which upstream's _ManagerLogger reads.

    def current_step(self) -> int:
        return self.step

    @property
    def _quorum_id(self) -> int:
        return self.quorum_id


def kept_in(place: str) -> Any:
    """An attribute of the Manager, under a name that other projects read and set, which a part keeps.
    `place`: where it is kept, as a path from the Manager.
    """
    owner, _, name = place.rpartition(".")
    find = attrgetter(owner)
    return property(attrgetter(place), lambda manager, value: setattr(find(manager), name, value))
