"""Decides with which connection the groups of a quorum reduce when other groups join. Pure code.

Connecting takes NCCL some tenths of a second, and longer in a large job. A group that joins has to heal, so
at first it contributes nothing. Hence, when a quorum only adds groups that heal, the groups that are
connected keep their connection, and all groups of the quorum make the next one in the background. They hand
over to it in the first step for which each group has announced that it is made. Until then a group that joins
reduces nothing and commits nothing:

    step                    7      8            9            10           11
    quorum                  A, B   A, B, C      A, B, C      A, B, C      A, B, C
    have made the next one                      A            A, B, C
    A and B reduce with     A, B   A, B         A, B         A, B, C      A, B, C
    C                              connects     connects     heals        heals

A group announces its connections with its reconfigure handle. All groups of a quorum get the same
announcements, so they decide alike. Each rank decides on its own, since it is connected only with the same
rank of the other groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Optional


class Way(Enum):
    """How the groups of a quorum connect, and with which connection they reduce."""

    CONNECT = "all groups connect before they reduce"
    KEEP = "all groups are connected already"
    STANDBY = "the connected groups reduce among themselves while all groups make the next connection"
    HAND_OVER = "all groups have made the next connection, and reduce with it"


class Connections(NamedTuple):
    """The connections of one rank, as it announces them.

    Attributes:
        name: name of the connection that it reduces with; empty: it has none, or the connection is broken.
        size: number of groups of that connection.
        next: name of the next connection if that is made, else empty.
        step: the step of the group's weights; 0 with a connection, so that announcements do not change in
            each step.
    """

    name: str = ""
    size: int = 0
    next: str = ""
    step: int = 0

    def encode(self) -> str:
        """The announcement, in characters that a URL may contain."""
        return f"{self.name}/{self.size}/{self.next}/{self.step}"

    @classmethod
    def decode(cls, text: str) -> Optional[Connections]:
        """Returns None unless the text is an announcement."""
        fields = text.split("/")
        if len(fields) != 4 or not all(field.isdecimal() for field in fields[1::2]):
            return None
        name, size, following, step = fields
        return cls(name, int(size), following, int(step))


def name_of(quorum_id: int, handles: Sequence[str]) -> str:
    """The name of the connection of a quorum's groups: equal in all of them, and different for other
    processes. `handles`: the handles of the groups, without announcements that change.
    """
    return hashlib.sha256("\n".join([str(quorum_id), *handles]).encode()).hexdigest()[:16]


def decide(name: str, announced: Sequence[Optional[Connections]], max_step: int) -> Way:
    """Decides for all groups of a quorum.

    Args:
        name: name of the connection of all of them.
        announced: the announcement of each group; None: it announces nothing (an upstream group, or one that
            does not heal along).
        max_step: the step of the groups that are up to date.
    """
    groups = [one for one in announced if one is not None]
    connected = [one for one in groups if one.name]
    if len(groups) < len(announced) or len({(one.name, one.size) for one in connected}) != 1:
        return Way.CONNECT
    if connected[0].size != len(connected):
        return Way.CONNECT  # a group has left the connection, or its part of it is broken
    if len(connected) == len(groups):
        return Way.KEEP
    if all(one.next == name for one in groups):
        return Way.HAND_OVER
    if any(one.step >= max_step for one in groups if not one.name):
        return Way.CONNECT  # the gradients of a group that is not connected count in this step
    return Way.STANDBY
