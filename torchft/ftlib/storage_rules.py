"""Decides a member's next action from the records and views in a shared directory. Pure, without torch.

Views are numbered, and each number can be created by only one process. A member that needs a view *wants* a
number above that of the latest view. When all live members want one, the first of them in order creates the
next view. Each member of the view uses it as soon as it sees it: their communicator connects only if all of
them do so, because its prefix has the digest of the view, and its size. A member that wants a number has left
all views with smaller numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Optional, Union

from torchft.ftlib.views import Identity, Member, View, newest


class Record(NamedTuple):
    """The record that a member writes about itself.

    Attributes:
        address: address of its store.
        wants: smallest number of a view that it may still use.
    """

    address: str
    wants: int = 0


@dataclass(frozen=True)
class Want:
    """Action: write in the record that this member has left all views below this number."""

    number: int


@dataclass(frozen=True)
class Create:
    """Action: create the view, unless its number exists."""

    view: View


@dataclass(frozen=True)
class Take:
    """Action: use the view."""

    view: View


@dataclass(frozen=True)
class Wait:
    """Action: wait for these members; if the list is empty, for further members."""

    members: tuple[Identity, ...]


Action = Union[Want, Create, Take, Wait]


def living(records: Mapping[Identity, Record]) -> dict[Identity, Record]:
    """Removes records of earlier incarnations of the same name."""
    return {identity: records[identity] for identity in newest(records)}


def decide(
    me: Identity, alive: Mapping[Identity, Record], latest: Optional[View], min_members: int = 1
) -> Action:
    """Decides the next action of a member that waits for a view.

    Args:
        alive: records of live members, one incarnation of each name, ``me`` among them.
        latest: the view with the largest number.
    """
    number = latest.number if latest else 0
    mine = alive[me]
    if latest is not None and mine.wants <= number:
        left = [i for i in latest.identities if i not in alive or alive[i].wants > number]
        if left or me not in latest.identities:
            return Want(number + 1)
        return Take(latest)
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
        ended: the reason why the view does not hold any more; empty while it holds.
    """

    joining: tuple[Identity, ...]
    ended: str = ""


def news(me: Identity, alive: Mapping[Identity, Record], view: View, latest: int) -> News:
    """What a member of ``view`` sees. ``alive`` is as in ``decide``, perhaps without ``me``, if its own
    record expired; ``latest`` is the number of the latest view.
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
