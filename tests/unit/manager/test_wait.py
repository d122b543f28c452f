"""Groups wait for those that heal as long as the heals make progress."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from torch.distributed import HashStore, TCPStore

from tests.unit.waiting import wait_until
from torchft._agreement import HEALS, announce
from torchft._manager.heal import wait as wait_module
from torchft._manager.heal.together import GroupRanks
from torchft._manager.heal.wait import HealWait, SharedCounter
from torchft._manager.quorum.plan import Plan
from torchft._manager.rank import RankState
from torchft.process_group.reconfigure import Handle, create_store_client

LONG, SHORT = timedelta(seconds=60), timedelta(milliseconds=200)


class PeerFailed(RuntimeError):
    pass


class Job:
    """Two groups of as many ranks, in one quorum."""

    def __init__(self, ranks: int, timeout: timedelta, native: bool) -> None:
        # By rank, that of the first group's handle. The ranks of a group share another one.
        self.columns = [
            TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(ranks)
        ]
        # The handles of native groups name no store: all ranks take the quorum's.
        self.rendezvous = f"127.0.0.1:{self.columns[0].port}" if native else ""
        groups = [HashStore() for _ in range(2)]
        self.failed: list[Exception] = []
        self.waits = {
            (group, rank): HealWait(
                self.check,
                RankState(timeout),
                GroupRanks(groups[group], f"g{group}", rank, ranks),
                MagicMock(),
            )
            for group in range(2)
            for rank in range(ranks)
        }

    def check(self) -> None:
        for error in self.failed:
            raise error

    def plan(self, rank: int, awaits_heals: bool = True, step: int = 7) -> Plan:
        fields: dict[str, Any] = dict.fromkeys(Plan.__dataclass_fields__)
        handle = Handle(id="a", store=f"127.0.0.1:{self.columns[rank].port}").encode()
        if self.rendezvous:
            handle = announce("tcp 10.0.0.1 5", ((HEALS, "1"),), native=True)
            fields["store_address"] = self.rendezvous
        fields.update(quorum_id=3, max_step=step, replica_world_size=2, handles=[handle, ""])
        made = Plan(**fields)
        made.__dict__["awaits_heals"] = awaits_heals  # tested in test_plan.py
        return made

    def end(self) -> None:
        for wait in self.waits.values():
            wait.end()


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    # On a busy machine a store of this process answers late.
    monkeypatch.setattr(wait_module, "_CONNECT_TIMEOUT", LONG)
    with ExitStack() as stack:
        yield stack


def make(stack: ExitStack, ranks: int = 1, timeout: timedelta = LONG, native: bool = False) -> Job:
    job = Job(ranks, timeout, native)
    stack.callback(job.end)
    return job


def test_a_counter_has_the_progress_of_all_and_how_many_are_ready() -> None:
    store = HashStore()
    a, b = SharedCounter(store, "key", 2, set()), SharedCounter(store, "key", 2, set())
    assert not a.count(False, False)
    assert b.count(True, False) and a.count(False, False) and not a.count(False, False)
    assert a.count(False, True) and not a.count(False, True), "it is ready once"
    assert not a.all_ready and not b.all_ready
    assert b.count(True, True) and b.all_ready
    assert a.count(False, True) and a.all_ready


def test_one_that_begins_again_is_ready_once_and_not_before() -> None:
    store, of_a, of_b = HashStore(), set[str](), set[str]()
    a, b = SharedCounter(store, "key", 2, of_a), SharedCounter(store, "key", 2, of_b)
    a.count(False, True)
    for ready in (False, True, True):
        a = SharedCounter(store, "key", 2, of_a)
        a.count(False, ready)
        assert not a.all_ready
    assert b.count(False, True) and b.all_ready
    again = SharedCounter(store, "key", 2, of_b)
    again.count(False, False)
    a.count(False, True)
    assert not a.all_ready and not again.all_ready


@pytest.mark.parametrize("ranks", [1, 2])
def test_counters_of_earlier_steps_are_deleted(stack: ExitStack, ranks: int) -> None:
    """A group that never heals is behind in each step of the job."""
    job = make(stack, ranks)
    pool = stack.enter_context(ThreadPoolExecutor(4))

    def step(of: tuple[int, int], number: int) -> None:
        with job.waits[of].following(job.plan(of[1], step=number)):
            pass
        job.waits[of].wait()

    stores = [*job.columns, *(wait.ranks.store for wait in list(job.waits.values())[::ranks])]
    counts = []
    for number in range(3):
        for one in [pool.submit(step, of, number) for of in job.waits]:
            one.result(60)
        counts.append([cast(Any, store).num_keys() for store in stores])
    assert counts[1] == counts[2] == counts[0]


def waits(wait: HealWait) -> bool:
    return wait.rank_state.activity(waits=True) == ("waits for a group that heals", True, "")


def test_a_group_waits_until_the_other_one_has_healed(stack: ExitStack) -> None:
    job = make(stack)
    survivor, target = job.waits[0, 0], job.waits[1, 0]
    pool = stack.enter_context(ThreadPoolExecutor(1))
    with target.following(job.plan(0)):
        assert target.waited_for
        with survivor.following(job.plan(0)):
            pass
        waited = pool.submit(survivor.wait)
        wait_until(lambda: waits(survivor))
        for nbytes in (10, 20):
            before = cast(Any, survivor.waiting).moved_at
            target.received(nbytes)
            wait_until(lambda before=before: cast(Any, survivor.waiting).moved_at > before)
        assert not waited.done()
    waited.result(60)
    assert not waits(survivor)
    target.wait()
    target.wait()  # later reductions of the step
    assert not target.waited_for


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_waits_again_if_the_step_begins_again(stack: ExitStack, ranks: int) -> None:
    """In the same quorum, the other group heals again."""
    job = make(stack, ranks)
    pool = stack.enter_context(ThreadPoolExecutor(2 * ranks))
    survivors, targets = ([job.waits[group, rank] for rank in range(ranks)] for group in range(2))

    def step(wait: HealWait) -> None:
        with wait.following(job.plan(wait.ranks.number)):
            pass
        wait.wait()

    for one in [pool.submit(step, wait) for wait in job.waits.values()]:
        one.result(60)
    with ExitStack() as healing:
        for target in targets:
            healing.enter_context(target.following(job.plan(target.ranks.number)))
        wait_until(lambda: not any(target._counts for target in targets))
        waited = [pool.submit(step, survivor) for survivor in survivors]
        wait_until(lambda: all(waits(survivor) for survivor in survivors))
        before = cast(Any, survivors[0].waiting).moved_at
        targets[0].received(10)
        wait_until(lambda: cast(Any, survivors[0].waiting).moved_at > before)
        assert not any(one.done() for one in waited)
    for one in waited:
        one.result(60)


def test_a_heal_without_progress_ends_the_wait(stack: ExitStack) -> None:
    job = make(stack, timeout=SHORT)
    with job.waits[1, 0].following(job.plan(0)), job.waits[0, 0].following(job.plan(0)):
        pass
    survivor = make(stack, timeout=SHORT).waits[0, 0]
    with survivor.following(job.plan(0, step=8)):
        pass
    with pytest.raises(
        TimeoutError, match=r"timed out: a group of this quorum heals, and has received nothing for 0\.2"
    ):
        survivor.wait()
    survivor.wait()  # the step is lost, and does not wait again


def test_a_failure_of_a_peer_ends_the_wait(stack: ExitStack) -> None:
    job = make(stack)
    survivor = job.waits[0, 0]
    with survivor.following(job.plan(0)):
        pass
    pool = stack.enter_context(ThreadPoolExecutor(1))
    waited = pool.submit(survivor.wait)
    wait_until(lambda: waits(survivor))
    job.failed.append(PeerFailed("group 1 has failed"))
    with pytest.raises(PeerFailed):
        waited.result(60)


@pytest.mark.parametrize("native", [False, True])
def test_the_ranks_of_a_group_begin_together(stack: ExitStack, native: bool) -> None:
    """Otherwise those whose counterparts have healed would vote, and their vote has a timeout."""
    job = make(stack, ranks=2, native=native)
    pool = stack.enter_context(ThreadPoolExecutor(4))
    heal = threading.Event()

    def step(group: int, rank: int) -> None:
        wait = job.waits[group, rank]
        with wait.following(job.plan(rank)):
            if (group, rank) == (1, 1):
                assert heal.wait(60)
        wait.wait()

    steps = [pool.submit(step, *of) for of in job.waits]
    waiting = [wait for of, wait in job.waits.items() if of != (1, 1)]
    wait_until(lambda: all(waits(wait) for wait in waiting))
    before = [cast(Any, wait.waiting).moved_at for wait in waiting]
    job.waits[1, 1].received(5)
    # also the ranks whose own counterparts have healed learn of the progress
    wait_until(lambda: all(cast(Any, wait.waiting).moved_at > at for wait, at in zip(waiting, before)))
    assert not any(one.done() for one in steps)
    heal.set()
    for one in steps:
        one.result(60)


def test_without_heals_there_is_no_wait_and_no_thread(stack: ExitStack) -> None:
    wait = make(stack).waits[0, 0]
    before = threading.active_count()
    with wait.following(make(stack).plan(0, awaits_heals=False)):
        assert not wait.waited_for
    wait.received(5)
    wait.wait()
    assert threading.active_count() == before


def test_the_client_of_the_store_is_kept_from_step_to_step(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that heals in passing does so in many steps, and the others wait for no connection in each of
    them.
    """
    connected: list[str] = []

    def connect(address: str, timeout: timedelta) -> Any:
        connected.append(address)
        return create_store_client(address, timeout)

    monkeypatch.setattr(wait_module, "create_store_client", connect)
    job = make(stack)

    def step(number: int) -> None:
        for wait in job.waits.values():
            with wait.following(job.plan(0, step=number)):
                pass
        for wait in job.waits.values():
            wait.wait()

    for number in range(3):
        step(number)
    assert len(connected) == 2
    before = job.columns[0]
    job.columns[0] = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    step(3)
    assert len(connected) == 4 and before.port != job.columns[0].port
    for wait in job.waits.values():
        with wait.following(job.plan(0, awaits_heals=False)):
            pass
        assert wait._clients == {}


def test_a_store_that_has_ended_delays_no_step(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process has failed, which the lighthouse reports, or the reductions find."""
    monkeypatch.setattr(wait_module, "_CONNECT_TIMEOUT", SHORT)
    job = make(stack)
    plan = job.plan(0)
    job.columns.clear()
    wait = job.waits[0, 0]
    with wait.following(plan):
        pass
    wait.wait()
    assert "not known whether all groups have healed" in str(cast(Any, wait.logger).warn.call_args)


def test_a_step_that_is_over_ends_its_thread(stack: ExitStack) -> None:
    job = make(stack)
    wait = job.waits[0, 0]
    with wait.following(job.plan(0)):
        pass
    attempt = cast(Any, wait.waiting).attempt
    wait.end()
    assert attempt.ended and not wait.waited_for
    wait_until(lambda: not any(t.name == "torchft_connect" for t in threading.enumerate()))
