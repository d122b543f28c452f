"""Chooses what a group restores. Pure code.

All ranks of a group restore the same step of the same history. After a failure of all groups two groups can
have committed the same step in different quorums, with different weights: the quorum tells these apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional


class Copy(NamedTuple):
    """A complete copy of a rank's state.

    Attributes:
        step: the step of the state.
        quorum: the quorum in which it was committed; -1: not known.
        where: the place of the copy.
        saved: when it was completed, in seconds since 1970.
    """

    step: int
    quorum: int
    where: str
    saved: float = 0.0


class Chosen(NamedTuple):
    """The copies that a group restores.

    Attributes:
        step, quorum: of all of them.
        places: for each rank of the group, the place of its copy.
    """

    step: int
    quorum: int
    places: tuple[str, ...]


def newest(ranks: Sequence[Sequence[Copy]]) -> Optional[Chosen]:
    """Chooses the newest step that all ranks of a group can restore; None if there is none. `ranks`: the
    copies that each rank can reach; of several copies of a step the rank prefers the first.
    """
    reach: list[dict[tuple[int, int], str]] = []
    for copies in ranks:
        places: dict[tuple[int, int], str] = {}
        for copy in copies:
            places.setdefault((copy.step, copy.quorum), copy.where)
        reach.append(places)
    common = set(reach[0]).intersection(*reach[1:]) if reach else set()
    if not common:
        return None
    step, quorum = max(common)
    return Chosen(step, quorum, tuple(places[step, quorum] for places in reach))


def given_up(copies: Sequence[Copy]) -> dict[tuple[int, int], Copy]:
    """Returns step and quorum of the states that the job has given up, each with a copy that shows it: the
    job went on from an earlier step, in a later quorum and later. Ids of quorums may begin anew with another
    lighthouse, so they alone do not tell.
    """
    return {
        (one.step, one.quorum): other
        for one in copies
        for other in copies
        if other.quorum > one.quorum and other.step < one.step and other.saved > one.saved
    }
