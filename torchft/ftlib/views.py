"""The members of a view, their ranks, and whose state the others take over. Pure, without torch."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional


class Identity(NamedTuple):
    """One incarnation of a member.

    Attributes:
        name: name, unique among the members of the job at any time.
        incarnation: increases with each start of a process of this name.
    """

    name: str
    incarnation: int


def checked_name(name: Optional[str]) -> str:
    """A member's name, or a random one if None; ValueError if it cannot be part of a file or node name."""
    if name and not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"name={name!r} is not allowed; allowed: letters, digits, '-' and '_'")
    return name or uuid.uuid4().hex


class Member(NamedTuple):
    """
    Attributes:
        identity: identity of the member.
        address: "host:port" of the store that it hosts.
    """

    identity: Identity
    address: str


@dataclass(frozen=True)
class View:
    """A list of members that all of them have agreed on.

    Attributes:
        number: number of the view, unique in the job; later views have larger numbers.
        members: the members, in any order.
    """

    number: int
    members: tuple[Member, ...]

    @property
    def identities(self) -> list[Identity]:
        return [member.identity for member in self.members]

    @property
    def digest(self) -> str:
        """A hash of number and members, 64 bits in hex."""
        text = json.dumps([self.number, sorted(self.members)])
        return hashlib.sha256(f"torchft.ftlib view 1: {text}".encode()).hexdigest()[:16]

    @property
    def address(self) -> str:
        """Where the members meet: "host:port/prefix" in the store of rank 0, different for each view."""
        first = min(newest(self.identities))
        host = next(member.address for member in self.members if member.identity == first)
        return f"{host}/ftlib/{self.number}-{self.digest}"


def newest(identities: Iterable[Identity]) -> list[Identity]:
    """The latest incarnation of each name, in the order of the names."""
    latest: dict[str, Identity] = {}
    for identity in identities:
        latest[identity.name] = max(identity, latest.get(identity.name, identity))
    return sorted(latest.values())


class RankAssignScheme:
    """Computes ranks from a list of members. All members get the same result, without communication."""

    @staticmethod
    def get_rank_rand_size(member_list: Iterable[Identity], identity: Identity) -> tuple[int, int]:
        """Returns rank and size.

        Ranks follow the order of the names. If a name has several incarnations, only the latest one counts.

        Args:
            member_list: the members, in any order.
            identity: identity of the member whose rank is returned.

        Raises:
            ValueError: ``identity`` is not in the list, or is not the latest incarnation of its name.
        """
        members = newest(member_list)
        if identity not in members:
            later = next((other for other in members if other.name == identity.name), None)
            why = (
                f"a later incarnation, {later.incarnation}, has replaced it"
                if later
                else f"allowed: {members}"
            )
            raise ValueError(f"{identity} is no member: {why}")
        return members.index(identity), len(members)

    get_rank_and_size = get_rank_rand_size


INCOMPLETE = -2


class MemberProgress(NamedTuple):
    """The progress of a member's state.

    Attributes:
        view: number of the view of its last step; -1: it has made no step; INCOMPLETE: it may be a mixture of
            two states, because loading one has failed.
        step: number of steps in the state.
    """

    view: int = -1
    step: int = 0


def source(progress: Sequence[MemberProgress]) -> tuple[int, list[int]]:
    """Returns the rank whose state the others take over, and the ranks that take it over.

    Members whose last step was in the same view and has the same number have equal states. The members with
    the latest view count as most advanced, because that view continued without the others. States without a
    step are initial weights, which may differ.
    """
    best = max(progress)
    root = progress.index(best)
    behind = [rank for rank, each in enumerate(progress) if rank != root and (each != best or best.view < 0)]
    return root, behind
