"""Groups that join connect while the others train on: the decision, and the connections of random
histories.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock

import pytest

from tests.bounded import often
from torchft._agreement import CONNECTIONS, announce
from torchft._manager.connection import Connection
from torchft._manager.handover import Connections, Way, decide, name_of
from torchft._manager.quorum.plan import Plan
from torchft._manager.step.failures import Failures, PeerFailed
from torchft._torchft import MemberFailure
from torchft.process_group.reconfigure import Handle, ReconfigureOptions

PAIR = Connections("old", 2)
NEW = Connections()
BEHIND = Connections(step=3)


@pytest.mark.parametrize(
    ("announced", "way"),
    [
        ([NEW, NEW], Way.CONNECT),  # the first quorum of a job
        ([PAIR, PAIR], Way.KEEP),
        ([PAIR, PAIR, NEW], Way.STANDBY),
        ([PAIR, PAIR, BEHIND, NEW], Way.STANDBY),
        ([Connections("old", 1), NEW, NEW], Way.STANDBY),
        ([PAIR, NEW], Way.CONNECT),  # the other group of the connection has failed
        ([PAIR, NEW, NEW], Way.CONNECT),  # or its part is broken
        ([PAIR, PAIR, Connections("older", 2)], Way.CONNECT),
        ([PAIR, Connections("old", 3), NEW], Way.CONNECT),
        ([PAIR, PAIR, None], Way.CONNECT),  # an upstream group
        ([None, None], Way.CONNECT),
        ([PAIR, PAIR, Connections(step=10)], Way.CONNECT),  # its gradients count
        ([PAIR, PAIR, Connections(step=11)], Way.CONNECT),
        ([PAIR._replace(next="new"), PAIR._replace(next="new"), NEW], Way.STANDBY),
        ([PAIR._replace(next="new"), PAIR, NEW._replace(next="new")], Way.STANDBY),
        ([PAIR._replace(next="new")] * 2 + [NEW._replace(next="new")], Way.HAND_OVER),
        # That of an earlier quorum.
        ([PAIR._replace(next="newer")] * 2 + [NEW._replace(next="newer")], Way.STANDBY),
        # A group of the pair has failed since.
        ([PAIR._replace(next="new"), NEW._replace(next="new")], Way.CONNECT),
    ],
)
def test_decisions(announced: list[Optional[Connections]], way: Way) -> None:
    assert decide("new", announced, max_step=10) is way
    assert decide("new", announced[::-1], max_step=10) is way, "the order of the groups does not matter"


def test_at_step_0_all_groups_connect() -> None:
    assert decide("new", [PAIR, PAIR, NEW], max_step=0) is Way.CONNECT


@pytest.mark.parametrize("connections", [NEW, BEHIND, PAIR, PAIR._replace(next="new")])
def test_an_announcement_is_read_as_it_was_written(connections: Connections) -> None:
    assert Connections.decode(connections.encode()) == connections


@pytest.mark.parametrize("text", ["", "a", "a/b", "a/b/c/d", "a/1/c", "a/1/c/2/e", "a/-1/c/2", "a/1/c/²"])
def test_other_texts_announce_nothing(text: str) -> None:
    assert Connections.decode(text) is None


def test_names_differ_by_quorum_and_by_process() -> None:
    names = {name_of(1, ["a", "b"]), name_of(2, ["a", "b"]), name_of(1, ["a", "c"]), name_of(1, ["b", "a"])}
    assert len(names) == 4


# Random histories: connections of several groups, over a network that only remembers who connected with whom


@dataclass
class Attempt:
    """An attempt to make a standby connection; the history ends it."""

    uuid: int
    members: frozenset[str]
    made: bool = False
    error: Optional[Exception] = None

    @property
    def ended(self) -> bool:
        return self.made or self.error is not None


class Network:
    """The process group of one rank."""

    connects_standby = True

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.peers: Optional[tuple[int, frozenset[str]]] = None  # uuid and members of the connection in use
        self.standby: Optional[Attempt] = None
        self.waits = 0  # how often it was connected while the step waits
        self.used: set[int] = set()  # uuids of attempts

    def handle(self, connections: str) -> str:
        return announce(
            Handle(id=self.identity, store=f"{self.identity}:1").encode(), ((CONNECTIONS, connections),)
        )

    def connect_standby(self, opts: ReconfigureOptions) -> Attempt:
        members = frozenset(Handle.decode(handle).id for handle in opts.handles)
        self.used.add(opts.uuid)
        self.standby = Attempt(opts.uuid, members)
        return self.standby

    def hand_over(self) -> None:
        standby, self.standby = self.standby, None
        assert standby is not None and standby.error is None
        self.waits += not standby.made
        self.peers = standby.uuid, standby.members

    def abandon_standby(self, error: Exception, attempt: Optional[Attempt] = None) -> None:
        standby = self.standby
        if standby is not None and attempt in (None, standby):
            self.standby = None
            standby.made, standby.error = False, standby.error or error

    def reconfigure(self, uuid: int, handles: list[str]) -> None:
        self.abandon_standby(RuntimeError("other peers"))
        assert uuid not in self.used, "the store has the keys of an earlier meeting"
        self.waits += 1
        self.peers = uuid, frozenset(Handle.decode(handle).id for handle in handles)


@dataclass
class Group:
    """A replica group of one rank, as far as its connections matter."""

    name: str
    step: int = 0
    commit_failures: int = 0
    healing: int = 3  # steps that a heal takes, once the group is connected
    followed: Optional[int] = None  # id of the quorum that was followed last
    committed: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    may_wait: bool = True

    def __post_init__(self) -> None:
        self.network = Network(self.name)
        self.errors = MagicMock()
        self.failures = Failures(
            True, rank_state=MagicMock(), peers=MagicMock(), errors=MagicMock(),
            background=MagicMock(), logger=MagicMock(),
        )  # fmt: skip
        settings, layout = MagicMock(timeout=None), MagicMock()
        in_passing: Any = SimpleNamespace(why_not=lambda: None if self.may_wait else "a layout")
        self.connection = Connection(
            self.network, self.name, settings, layout, in_passing=in_passing,
            failures=self.failures, errors=self.errors, logger=MagicMock(),
        )  # type: ignore[arg-type]  # fmt: skip

    def ask(self) -> str:
        text = self.connection.announcement(self.step, self.commit_failures > 0)
        self.commit_failures = self.commit_failures or int(self.connection.needs_new_quorum)
        return self.network.handle(text)


class History:
    """Quorums of groups that join, fail, and lose steps at random.

    Attributes:
        errors: the probability that a group has an error in a step, which breaks its connection.
        fails: the probability that a group fails within a step.
    """

    errors = 0.0
    fails = 0.0

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.groups: dict[str, Group] = {}
        self.made = 0
        self.quorum_id = 0
        self.members: list[str] = []
        self.aborted: set[object] = set()  # connections

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    @property
    def max_step(self) -> int:
        return max((group.step for group in self.groups.values()), default=0)

    def join(self, step: int = 0) -> None:
        self.made += 1
        group = Group(f"g{self.made:03}", step, healing=self.random.randint(1, 4))
        self.groups[group.name] = group

    def fail(self, name: str) -> None:
        """A group fails, and the others of its quorum are informed."""
        del self.groups[name]
        if name not in self.members:
            return
        failure = MemberFailure(self.quorum_id, name, "killed")
        for group in self.groups.values():
            if group.name in self.members:
                group.failures.member_failed(failure)
                group.connection.peer_failed(failure)

    def is_sound(self, peers: Optional[tuple[int, frozenset[str]]]) -> bool:
        """Whether the groups of a connection can reduce with it."""
        return peers is not None and peers not in self.aborted and peers[1] <= set(self.groups)

    def fail_one(self) -> None:
        """One group fails, but never the last one that has the state."""
        keeps = next(name for name, group in self.groups.items() if group.step == self.max_step)
        others = [name for name in self.groups if name != keeps]
        if others:
            self.fail(self.random.choice(others))

    def end_attempts(self, chance: float, fails: float = 0.0) -> None:
        """Some attempts succeed: all of their groups have begun by now. Others fail."""
        for group in self.groups.values():
            standby = group.network.standby
            if (
                standby is not None
                and not standby.ended
                and standby.members <= set(self.groups)
                and self.chance(chance)
            ):
                if self.chance(fails):
                    standby.error = RuntimeError("refused")
                else:
                    standby.made = True

    def round(self) -> None:
        """One step of all groups."""
        groups = sorted(self.groups.values(), key=lambda group: group.name)
        names = [group.name for group in groups]
        connected = {group.network.peers for group in groups if group.network.peers is not None}
        handles = [group.ask() for group in groups]
        failing = any(group.commit_failures for group in groups)
        if names != self.members or failing:
            self.quorum_id += 1
        self.members = names
        max_step = self.max_step
        up_to_date = [group for group in groups if group.step == max_step]
        waits = {group.name: group.network.waits for group in groups}
        fails_after = self.random.randrange(len(groups)) if self.chance(self.fails) else None
        for rank, group in enumerate(groups):
            if group.name in self.groups:
                plan = _plan(self.quorum_id, rank, names, handles, max_step, len(up_to_date))
                group.errors.lose.reset_mock()
                if group.followed != self.quorum_id or group.connection.may_change(plan):
                    group.followed = self.quorum_id
                    group.connection.follow(plan, False, group.network.reconfigure)
            if rank == fails_after:
                self.fail_one()
        groups = [group for group in groups if group.name in self.groups]
        self._check(groups, [group for group in up_to_date if group.name in self.groups], names)
        if fails_after is None:
            assert all(group.connection.apart or self.is_sound(group.network.peers) for group in groups)
        may_wait = all(group.may_wait for group in groups)
        if may_wait and not failing and len(connected) == 1 and max_step > 0 and fails_after is None:
            ((_, members),) = connected
            if members <= set(names) and members >= {group.name for group in up_to_date}:
                assert {group.name: group.network.waits for group in groups} == waits, (
                    "no group waits for a connection"
                )
        for group in groups:
            if not group.connection.apart and self.chance(self.errors):
                self.aborted.add(group.network.peers)
        for group in groups:
            self._end(group, max_step)

    def _end(self, group: Group, max_step: int) -> None:
        error = group.errors.lose.called
        if not group.connection.apart and not error:
            try:
                group.failures.check()
            except PeerFailed:
                assert not self.is_sound(group.network.peers)
            error = error or not self.is_sound(group.network.peers)
        if error:
            group.commit_failures += 1
            group.lost.append(max_step)
            return
        group.commit_failures = 0
        if group.step == max_step:
            group.committed.append(max_step)
        elif not group.connection.apart:
            group.healing -= 1
        if group.step == max_step or group.healing <= 0:
            group.step = max_step + 1

    def _check(self, groups: list[Group], up_to_date: list[Group], names: list[str]) -> None:
        assert not [group.name for group in up_to_date if group.connection.apart]
        reduces = [g for g in groups if not g.connection.apart and not g.errors.lose.called]
        sound = {group.network.peers for group in reduces if self.is_sound(group.network.peers)}
        assert len(sound) <= 1, "all reduce with the same connection"
        for peers in sound:
            assert peers is not None
            assert peers[1] <= set(names), "no group reduces with one that is not in the quorum"
            assert {group.name for group in up_to_date} <= peers[1], (
                "the gradients of all participants are added"
            )
        for group in groups:
            standby = group.network.standby
            assert standby is None or standby.ended or standby.members <= set(self.groups), (
                "it would wait for its timeout"
            )


def _plan(
    quorum_id: int, rank: int, names: list[str], handles: list[str], step: int, up_to_date: int
) -> Plan:
    fields: dict[str, Any] = dict.fromkeys(Plan.__dataclass_fields__)
    fields.update(
        quorum_id=quorum_id, replica_rank=rank, replica_world_size=len(names), replica_ids=names,
        handles=handles, max_step=step, num_up_to_date=up_to_date,
        participants=up_to_date, recover_dst=[], help_dst=[],
    )  # fmt: skip
    return Plan(**fields)


@pytest.mark.parametrize("seed", range(often(120)))
def test_random_histories(seed: int) -> None:
    history = History(seed)
    history.join()
    history.join()
    choose = history.random.choice
    chance, history.errors, history.fails = (
        choose([0.2, 0.5, 0.9]),
        choose([0.0, 0.0, 0.05]),
        choose([0.0, 0.1]),
    )
    layouts = choose([0.0, 0.0, 0.02])  # the probability that a group registers a layout in a step
    for _ in range(60):
        if history.chance(0.15) and len(history.groups) < 7:
            history.join(step=history.max_step if history.chance(0.2) else 0)
        if history.chance(0.1):
            history.fail_one()
        history.end_attempts(chance, fails=choose([0.0, 0.2]))
        for group in history.groups.values():
            if history.chance(layouts):
                group.may_wait = False
        history.round()
    history.errors = history.fails = 0.0
    for _ in range(12):
        history.end_attempts(1.0)
        history.round()
    groups = list(history.groups.values())
    assert {group.network.peers for group in groups} == {groups[0].network.peers}
    assert groups[0].network.peers is not None and groups[0].network.peers[1] == set(history.groups)
    assert len({group.step for group in groups}) == 1


def trained() -> History:
    """Two groups that have trained for five steps."""
    history = History(0)
    history.join()
    history.join()
    for _ in range(5):
        history.round()
    return history


def test_after_three_failed_attempts_all_groups_connect_at_once() -> None:
    """A second connection may not fit into the memory of a device."""
    history = trained()
    history.join()
    waits = [group.network.waits for group in history.groups.values()]
    for _ in range(3):
        history.round()
        history.end_attempts(1.0, fails=1.0)
    assert [group.network.waits for group in history.groups.values()] == waits
    history.round()
    assert [group.network.waits - before for group, before in zip(history.groups.values(), waits)] == [
        1,
        1,
        1,
    ]
    assert not any(group.lost for group in history.groups.values())
    for _ in range(5):
        history.round()
    history.join()
    history.round()
    assert all(group.network.standby is not None for group in history.groups.values()), (
        "a success is a new start"
    )


def test_a_group_that_joins_and_fails_costs_the_others_nothing() -> None:
    history = trained()
    others = list(history.groups.values())
    waits = [group.network.waits for group in others]
    for _ in range(3):
        history.join()
        history.round()
        history.round()
        history.fail(f"g{history.made:03}")
        history.round()
    assert [group.network.waits for group in others] == waits
    assert not any(group.lost for group in others) and len(others[0].committed) == 14


def test_a_group_that_waits_for_its_connection_learns_of_a_failure() -> None:
    """Before its vote it waits for all groups of the quorum, of which the failed one does not get ready."""
    history = History(0)
    history.join()
    history.join()
    for _ in range(6):
        history.end_attempts(1.0)
        history.round()
    history.join()
    history.round()
    first, _, joining = history.groups.values()
    assert joining.connection.apart and not first.connection.apart
    joining.failures.check()
    history.fail(first.name)
    with pytest.raises(PeerFailed):
        joining.failures.check()
