"""Groups that join connect while the others train on. Then all have the same bits, and no step was lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
import torch.distributed as dist
from torch import optim
from torch.distributed import Store

from tests.integration.cluster import DEADLINE, Cluster, Rank
from tests.integration.test_heal_along import LEAST_ROUNDS, Loop, TwoRanks, _run, halfway
from tests.integration.test_heal_along import one_part_a_step as one_part_a_step
from torchft.process_group import ProcessGroup, ProcessGroupGloo

ALONE = 10  # steps that groups take while others connect with them


@dataclass
class Connecting:
    """Holds connections of at least ``size`` groups until the test lets them be made."""

    size: int
    open: threading.Event = field(default_factory=threading.Event)
    # Group, and number of groups that it connected with.
    made: list[tuple[int, int]] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)  # groups that made a connection beside the one in use
    fails: Callable[[int, int], None] = lambda group, size: None

    def make(self, group: int) -> ProcessGroup:
        connecting = self

        class Held(ProcessGroupGloo):
            def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
                if world_size >= connecting.size:
                    assert connecting.open.wait(DEADLINE.total_seconds())
                connecting.fails(group, world_size)
                connecting.made.append((group, world_size))
                return super()._create_pg(store, rank, world_size)

            def connect_standby(self, opts: Any) -> Any:
                connecting.beside.append(group)
                return super().connect_standby(opts)

        return Held(timeout=DEADLINE)


@pytest.fixture
def connecting() -> Iterator[Connecting]:
    made = Connecting(3)
    yield made
    made.open.set()


@pytest.fixture
def cluster(connecting: Connecting) -> Iterator[Cluster]:
    with Cluster(make_pg=connecting.make) as built:
        try:
            yield built
        finally:
            connecting.open.set()


@dataclass
class Watch:
    """Counts the steps of group 0 in quorums of ``size`` groups. In the tenth it calls ``then``, or a group
    fails.
    """

    size: int
    then: Callable[[], None] = lambda: None
    also: Callable[[Rank, int], None] = lambda rank, round: None
    crashes: Optional[int] = None  # the group that fails
    steps: int = 0

    def __call__(self, rank: Rank, round: int) -> None:
        self.also(rank, round)
        if rank.group == self.crashes and self.steps >= ALONE:
            rank.crash()
        plan = rank.manager._current.plan if rank.manager is not None else None
        if rank.group == 0 and rank.rank == 0 and plan is not None and len(plan.replica_ids) >= self.size:
            self.steps += 1
            if self.steps == ALONE:
                self.then()


def _lost(loop: Loop, group: int) -> int:
    return sum(not committed for _, committed, _ in loop.histories[group])


def test_the_others_train_on_while_a_group_connects(
    cluster: Cluster, connecting: Connecting, caplog: pytest.LogCaptureFixture
) -> None:
    reports: set[tuple[bool, str]] = set()

    def reduced(rank: Rank, round: int) -> None:
        if rank.manager is not None and rank.manager._connection.apart:
            reports.add(rank.manager._failures.progress())

    loop = Loop(begun=Watch(3, connecting.open.set), reduced=reduced)
    with caplog.at_level(logging.INFO):
        _run(cluster, loop, first=2, later=1)
    assert reports == {(False, "computes, after 0 collectives of this step", "")}, (
        "it could be reported as stalled"
    )
    assert _lost(loop, 0) == _lost(loop, 1) == 0
    assert loop.joined[2] >= ALONE - 1 + LEAST_ROUNDS, "it heals once it is connected"
    assert sorted(connecting.made) == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], "each connection is made once"
    assert sorted(connecting.beside) == [0, 1, 2]
    assert {participants for _, _, participants in loop.histories[0]} == {2, 3}
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert not [text for text in warnings if "lost" in text or "connect" in text or "weights" in text]


def test_a_group_that_connects_does_not_end_for_its_max_retries(
    cluster: Cluster, connecting: Connecting
) -> None:
    loop = Loop(begun=Watch(3, connecting.open.set), settings={"max_retries": 2})
    _run(cluster, loop, first=2, later=1)
    assert _lost(loop, 2) > ALONE


def test_a_state_as_a_whole_follows_the_connection(cluster: Cluster, connecting: Connecting) -> None:
    class Own(optim.Adam):
        pass

    loop = Loop(begun=Watch(3, connecting.open.set), make=lambda model: Own(model.parameters()))
    _run(cluster, loop, first=2, later=1)
    assert _lost(loop, 0) == _lost(loop, 1) == 0
    assert ALONE - 1 <= loop.joined[2] < ALONE + LEAST_ROUNDS


def two(manager: Any) -> bool:
    return len(manager._current.plan.replica_ids) == 2


def test_a_group_that_fails_while_it_connects_costs_nothing(cluster: Cluster, connecting: Connecting) -> None:
    watch = Watch(3, crashes=2)
    loop = Loop(together=2, begun=watch, counts=lambda manager: watch.steps >= ALONE and two(manager))
    found = _run(cluster, loop, first=2, later=1)
    assert len(found) == 2 and _lost(loop, 0) == _lost(loop, 1) == 0
    assert sorted(connecting.made) == [(0, 2), (1, 2)], "the others keep their connection"


@pytest.mark.slow
def test_a_peer_that_fails_meanwhile_costs_one_step(cluster: Cluster, connecting: Connecting) -> None:
    """The connection in use lacks a group then: the other group and the new one connect at once."""
    watch = Watch(3, crashes=1)
    loop = Loop(together=2, begun=watch, counts=lambda manager: watch.steps >= ALONE and two(manager))
    found = _run(cluster, loop, first=2, later=1)
    assert len(found) == 2 and _lost(loop, 0) <= 1
    assert connecting.made.count((0, 2)) == 2


@pytest.mark.slow
def test_an_attempt_that_fails_is_repeated(
    cluster: Cluster, connecting: Connecting, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[int] = []

    def fails(group: int, size: int) -> None:
        if group == 1 and size == 3 and not failed:
            failed.append(group)
            raise RuntimeError("no route to host")

    connecting.fails = fails
    connecting.open.set()
    loop = Loop()
    _run(cluster, loop, first=2, later=1)
    assert failed and _lost(loop, 0) == _lost(loop, 1) == 0
    logged = [
        r.getMessage() for r in caplog.records if "the groups that join are not connected" in r.getMessage()
    ]
    assert len([text for text in logged if "no route to host" in text]) == 1


def test_a_group_joins_while_another_one_connects(cluster: Cluster, connecting: Connecting) -> None:
    """The second one of them makes all groups begin again, with a connection of four."""
    loop = Loop(together=4, begun=Watch(4, connecting.open.set))
    _run(cluster, loop, first=2, later=2)
    assert _lost(loop, 0) == _lost(loop, 1) == 0
    assert (0, 4) in connecting.made and connecting.made.count((0, 4)) == 1


@pytest.mark.slow
def test_a_group_joins_while_another_one_heals(cluster: Cluster, connecting: Connecting) -> None:
    """The group that heals is connected, and trains along with the others while the last one connects."""
    connecting.size = 4
    started: list[Any] = []
    here: list[int] = []  # elements of the group that heals, in each of its rounds

    def starts(rank: Rank, round: int) -> None:
        if rank.group == 0 and not started and halfway(cluster, 2):
            started.extend(cluster.start(loop, 3))
            cluster.wait_for_healthy(4)
        if rank.group == 2 and (target := rank.manager._in_passing._target):
            here.append(target.heal.here)

    watch = Watch(4, connecting.open.set, also=starts)
    loop = Loop(together=4, begun=watch)
    _run(cluster, loop, first=2, later=1)
    assert started[0].result(timeout=60) is not None
    assert _lost(loop, 0) == _lost(loop, 1) == 0
    assert loop.joined[2] >= LEAST_ROUNDS
    assert here == sorted(here), "it began anew"


@pytest.mark.slow
def test_ranks_of_a_group_connect_at_different_times(cluster: Cluster) -> None:
    """The first rank is connected and trains along while the second one still waits."""
    slow = Connecting(2)
    kinds = iter([0, 1] * 2)
    quick = Connecting(2)
    quick.open.set()
    cluster.make_pg = lambda group: (slow if next(kinds) else quick).make(group)
    watch = Watch(2, slow.open.set)
    loop = TwoRanks(together=2, begun=watch)
    try:
        _run(cluster, loop, first=1, later=1, ranks=2)
    finally:
        slow.open.set()
    assert loop.joined[1] >= LEAST_ROUNDS and _lost(loop, 0) == 0


@pytest.mark.slow
def test_without_heal_along_in_one_group_all_connect_at_once(
    cluster: Cluster, connecting: Connecting
) -> None:
    @dataclass
    class Mixed(Loop):
        def __call__(self, rank: Rank) -> Optional[tuple[int, Any]]:
            given = dict(self.__dict__)
            if rank.group == 1:
                given["settings"] = {"heal_along": False}
            return Loop(**given)(rank)

    connecting.open.set()
    loop = Mixed()
    _run(cluster, loop, first=2, later=1)
    assert not connecting.beside and sorted(connecting.made) == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
