"""What a member does next when a directory holds the members' records and the views. Pure, and free of torch.

Views are numbered, and the directory lets one process create each number. A member that needs a view *wants* a number
above that of the latest view. When all live members want one, the first of them in order creates the next view; each
of its members confirms its digest, and takes the view when all have confirmed. A member that wants a higher number has
left all views below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from torchft.ftlib.views import Identity, Member, View, newest


class Record(NamedTuple):
    """What a member writes about itself.

    Attributes:
        address: of its store.
        wants: smallest number of a view that it may still take.
        confirmed: digest of the last view that it confirmed.
    """

    address: str
    wants: int = 0
    confirmed: str = ""


@dataclass(frozen=True)
class Want:
    """Action: write that views below this number are left."""

    number: int


@dataclass(frozen=True)
class Confirm:
    """Action: write that the view is confirmed."""

    view: View


@dataclass(frozen=True)
class Create:
    """Action: create the view, unless its number exists."""

    view: View


@dataclass(frozen=True)
class Take:
    """Action: use the view, which all members have confirmed."""

    view: View


@dataclass(frozen=True)
class Wait:
    """Action: wait for these members; if there are none, for further members."""

    members: tuple[Identity, ...]


Action = Union[Want, Confirm, Create, Take, Wait]


def living(records: Mapping[Identity, Record]) -> dict[Identity, Record]:
    """Removes records of earlier incarnations of the same name."""
    return {identity: records[identity] for identity in newest(records)}


def decide(me: Identity, alive: Mapping[Identity, Record], latest: Optional[View], min_members: int = 1) -> Action:
    """Decides the next action of a member that waits for a view.

    Args:
        me: this member; it is in ``alive``.
        alive: records of live members, one incarnation of each name.
        latest: the view with the largest number.
        min_members: the smallest view that is created.
    """
    number = latest.number if latest else 0
    mine = alive[me]
    if latest is not None and mine.wants <= number:
        left = [i for i in latest.identities if i not in alive or alive[i].wants > number]
        if left or me not in latest.identities:
            return Want(number + 1)
        if mine.confirmed != latest.digest:
            return Confirm(latest)
        missing = tuple(i for i in latest.identities if alive[i].confirmed != latest.digest)
        return Wait(missing) if missing else Take(latest)
    absent = tuple(identity for identity, record in sorted(alive.items()) if record.wants <= number)
    if absent or len(alive) < min_members:
        return Wait(absent)
    first = min(alive)
    if first != me:
        return Wait((first,))
    return Create(View(number + 1, tuple(Member(i, record.address) for i, record in sorted(alive.items()))))


class News(NamedTuple):
    """Changes that a member of a view sees in the directory.

    Attributes:
        joining: processes that want to become members.
        ended: why the view does not hold any more; empty as long as it does.
    """

    joining: tuple[Identity, ...]
    ended: str = ""


def news(me: Identity, alive: Mapping[Identity, Record], view: View, latest: int) -> News:
    """
    Args:
        me: a member of the view.
        alive: as in ``decide``; this member may be absent, if its own record expired.
        view: that this member took.
        latest: the largest number of a view.
    """
    ended = ""
    if latest > view.number:
        ended = f"view {latest} was created without this member"
    for identity in view.identities:
        if identity not in alive:
            ended = f"{identity.name} has not renewed its record"
        elif alive[identity].wants > view.number and identity != me:
            ended = f"{identity.name} has left the view"
    joining = tuple(i for i in sorted(alive) if i not in view.identities and alive[i].wants > view.number)
    return News(joining, ended)
