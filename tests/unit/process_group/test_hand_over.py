"""A group connects with other peers while it keeps the present ones, and then hands over to them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Store, TCPStore

from tests.unit.process_group.ranks import TIMEOUT, connect, on_ranks
from tests.unit.waiting import wait_until
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from torchft.process_group.reconfigure import ReconfigureOptions


class Gated(ProcessGroupGloo):
    """A group that connects with more than two peers only when the gate is open."""

    def __init__(self) -> None:
        super().__init__(TIMEOUT)
        self.gate = threading.Event()
        self.connects = threading.Event()

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        if world_size > 2:
            self.connects.set()
            assert self.gate.wait(TIMEOUT.total_seconds())
        return super()._create_pg(store, rank, world_size)


@pytest.fixture
def groups(store: TCPStore) -> Iterator[list[Gated]]:
    """Three groups, of which two are connected."""
    made = [Gated() for _ in range(3)]
    connect(made[:2], store)
    yield made
    for group in made:
        group.gate.set()
        group.shutdown()


def beside(groups: list[Gated], uuid: int = 1) -> list[Any]:
    opts = ReconfigureOptions()
    opts.handles = [group.get_reconfigure_handle() for group in groups]
    opts.uuid = uuid
    opts.timeout = TIMEOUT
    return [group.connect_standby(opts) for group in groups]


def reduced(groups: list[Gated]) -> list[float]:
    tensors = [torch.ones(1) for _ in groups]
    on_ranks(len(groups), lambda rank: groups[rank].allreduce([tensors[rank]], ReduceOp.SUM).wait())
    return [tensor.item() for tensor in tensors]


def test_the_present_peers_reduce_until_they_hand_over(groups: list[Gated]) -> None:
    attempts = beside(groups)
    for group in groups:
        assert group.connects.wait(TIMEOUT.total_seconds())
    assert reduced(groups[:2]) == [2.0, 2.0]
    for group in groups:
        group.gate.set()
    wait_until(lambda: all(attempt.ended for attempt in attempts))
    assert not any(attempt.error for attempt in attempts)
    assert reduced(groups[:2]) == [2.0, 2.0] and groups[0].size() == 2
    for group in groups:
        group.hand_over()
    assert [group.size() for group in groups] == [3] * 3 and [group.rank() for group in groups] == [0, 1, 2]
    assert reduced(groups) == [3.0] * 3
    assert all(group.errored() is None for group in groups)


def test_handing_over_waits_until_the_peers_are_connected(groups: list[Gated]) -> None:
    beside(groups)
    threading.Timer(0.1, lambda: [group.gate.set() for group in groups]).start()
    on_ranks(3, lambda rank: groups[rank].hand_over())
    assert reduced(groups) == [3.0] * 3


def test_an_abandoned_attempt_leaves_the_present_peers(groups: list[Gated]) -> None:
    attempts = beside(groups)
    for group in groups:
        group.abandon_standby(RuntimeError("a peer has failed"))
    assert all(attempt.ended and "a peer has failed" in str(attempt.error) for attempt in attempts)
    assert reduced(groups[:2]) == [2.0, 2.0] and groups[0].errored() is None
    with pytest.raises(RuntimeError, match="torchft-gloo has no other peers to hand over to"):
        groups[0].hand_over()
    assert reduced(groups[:2]) == [2.0, 2.0]


def test_an_attempt_that_is_not_the_latest_ends_nothing(groups: list[Gated]) -> None:
    first = beside(groups[:2])
    second = beside(groups, uuid=2)
    groups[0].abandon_standby(RuntimeError("a peer of the first one has failed"), first[0])
    for group in groups:
        group.gate.set()
    wait_until(lambda: all(attempt.ended for attempt in second))
    assert all(attempt.made for attempt in second)


def test_a_connection_that_is_not_used_is_destroyed(groups: list[Gated]) -> None:
    for group in groups:
        group.gate.set()
    attempts = beside(groups)
    wait_until(lambda: all(attempt.ended for attempt in attempts))
    threads: list[str] = []
    unused = [
        weakref.ref(attempt._value[0].pg, lambda _: threads.append(threading.current_thread().name))
        for attempt in attempts
    ]
    again = beside(groups, uuid=2)  # a later quorum
    wait_until(lambda: all(attempt.ended for attempt in again))

    wait_until(lambda: len(threads) == len(unused))
    assert set(threads) == {"torchft_reaper"}, "the destruction may wait, and nothing waits for that thread"
    assert all("connects with other peers" in str(attempt.error) for attempt in attempts)
    for group in groups:
        group.hand_over()
    assert reduced(groups) == [3.0] * 3


@pytest.mark.parametrize("made", [False, True])
def test_an_abort_ends_both_connections(groups: list[Gated], made: bool) -> None:
    attempts = beside(groups)
    if made:
        for group in groups:
            group.gate.set()
        wait_until(lambda: all(attempt.made for attempt in attempts))
    groups[0].abort()
    assert not attempts[0].made
    assert attempts[0].ended and "was aborted" in str(attempts[0].error)
    with pytest.raises(RuntimeError, match="was aborted"):
        groups[0].allreduce([torch.ones(1)], ReduceOp.SUM)


def test_an_abort_ends_handing_over(groups: list[Gated]) -> None:
    beside(groups)
    wait_until(lambda: groups[0].connects.is_set())
    threading.Timer(0.1, groups[0].abort).start()
    with pytest.raises(RuntimeError, match="was aborted"):
        groups[0].hand_over()


@pytest.mark.parametrize("how", ["reconfigure", "shutdown"])
def test_other_peers_and_shutdown_end_an_attempt(groups: list[Gated], store: TCPStore, how: str) -> None:
    attempts = beside(groups)
    if how == "reconfigure":
        connect(groups[:2], store)
        assert reduced(groups[:2]) == [2.0, 2.0]
    else:
        for group in groups:
            group.shutdown()
    assert all(attempt.ended and attempt.error for attempt in attempts[:2])


def test_an_error_of_connecting_is_that_of_the_attempt(
    groups: list[Gated], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> dist.ProcessGroup:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(groups[0], "_create_pg", fails)
    attempts = beside(groups)
    wait_until(lambda: attempts[0].ended)
    assert str(attempts[0].error) == "no route to host"
    with pytest.raises(RuntimeError, match="no route to host"):
        groups[0].hand_over()


@pytest.mark.parametrize("when", ["connecting", "the first use"])
def test_an_error_keeps_no_group(groups: list[Gated], monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """The Manager keeps the error until the next step, and the destruction of a group may wait."""
    threads: list[str] = []
    made: list[Any] = []
    create = groups[0]._create_pg

    def creates(*args: Any) -> dist.ProcessGroup:
        pg = create(*args)
        made.append(weakref.ref(pg, lambda _: threads.append(threading.current_thread().name)))
        if when == "connecting":
            raise RuntimeError("no memory")
        return pg

    def uses(pg: dist.ProcessGroup) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(groups[0], "_create_pg", creates)
    monkeypatch.setattr(groups[0], "_use_first", uses)
    for group in groups:
        group.gate.set()
    attempts = beside(groups)
    wait_until(lambda: all(attempt.ended for attempt in attempts))
    with pytest.raises(RuntimeError, match="no memory") as error:
        groups[0].hand_over()
    wait_until(lambda: bool(threads))
    assert set(threads) <= {"torchft_reaper", "torchft_connect"} and error.value.__traceback__ is not None


def test_handles_are_checked_before_anything_changes(groups: list[Gated]) -> None:
    opts = ReconfigureOptions()
    opts.handles = ["no handle"]
    with pytest.raises(ValueError, match="not a torchft handle"):
        groups[0].connect_standby(opts)
    assert reduced(groups[:2]) == [2.0, 2.0]


def test_the_timeout_is_that_of_the_options(groups: list[Gated], store: TCPStore) -> None:
    opts = ReconfigureOptions()
    opts.handles = [group.get_reconfigure_handle() for group in groups]
    opts.uuid, opts.timeout = 1, timedelta(seconds=7)
    groups[0].connect_standby(opts)
    assert groups[0]._connect_timeout == timedelta(seconds=7)
    groups[0].abandon_standby(RuntimeError("enough"))
    groups[0].configure(f"localhost:{store.port}/alone", "alone", 0, 1)
    assert groups[0]._connect_timeout == TIMEOUT


class OwnConfigure(ProcessGroupGloo):
    def configure(self, *args: Any, **kwargs: Any) -> None:
        super().configure(*args, **kwargs)


@pytest.mark.parametrize(
    ("make", "can"),
    [
        (ProcessGroupGloo, True),
        (ProcessGroupNCCL, True),
        (OwnConfigure, False),  # it would not be called
        (lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo()), False),
        (lambda: ProcessGroupDummy(0, 1), None),
        (ProcessGroupBabyGloo, None),  # its worker has one group
    ],
)
def test_groups_that_connect_standby(make: Any, can: object) -> None:
    group: ProcessGroup = make()
    assert getattr(group, "connects_standby", None) is can
    group.shutdown()
