"""Behavior of every group: new peers, failed peers, abort, shutdown, timeouts.

The groups are listed in `backends`.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
)

from tests.unit.process_group.peers import Peers, check, runs_with, values
from tests.unit.process_group.ranks import TIMEOUT, in_threads, meeting, on_ranks
from torchft.process_group import ProcessGroup


@runs_with("fresh", wrappers=())
def test_fewer_and_more_and_other_ranks(fresh: Peers) -> None:
    for members in ([0, 1, 2], [2, 0], [1, 2, 0], [1], [0, 1]):
        groups = [fresh.groups[m] for m in members if m < fresh.n]
        if not groups:
            continue
        fresh.connect(groups)
        on_ranks(len(groups), lambda rank, groups=groups: check(groups[rank], rank, len(groups)))


@runs_with("fresh", native=False)  # a native group has no configure
def test_configure(fresh: Peers) -> None:
    for _ in range(2):
        where = meeting(fresh.store)
        fresh.run(
            lambda group, rank, where=where: group.configure(
                where, f"replica_{rank}", rank, fresh.n, 7, 0, 1, [0]
            )
        )
        fresh.run(lambda group, rank: check(group, rank, fresh.n))


@runs_with("fresh", native=False)  # a native group has a new handle for every set of peers
def test_the_handle_stays(fresh: Peers) -> None:
    group = fresh.groups[0]
    group.set_rank_info("replica", 0, 1, 3)
    handle = group.get_reconfigure_handle()
    assert '"global_rank": 3' in handle
    fresh.connect()
    assert group.get_reconfigure_handle() == handle
    if hasattr(dist.ProcessGroup, "get_reconfigure_handle"):  # PyTorch >= 2.14
        assert dist.ProcessGroup.get_reconfigure_handle(group) == handle  # from C++


def test_shutdown_and_abort_at_any_time(fresh: Peers) -> None:
    for group in fresh.groups:
        group.abort()
        group.shutdown()
    fresh.connect()
    for group in fresh.groups:
        group.abort()
        group.abort()
        group.shutdown()
        group.shutdown()
    fresh.connect()
    fresh.run(lambda group, rank: check(group, rank, fresh.n))


@runs_with("fresh", alone=False, native=False)  # a native group belongs to its creator, a dummy does nothing
def test_calls_after_shutdown(fresh: Peers) -> None:
    fresh.connect()
    for group in fresh.groups:
        group.shutdown()
        with pytest.raises(
            (AssertionError, RuntimeError, OSError), match=r"not initialized|shut down|no peers"
        ):
            group.broadcast_one(torch.ones(1), 0).wait()
        group.set_timeout(TIMEOUT)
        assert group.errored() is None
    fresh.connect()
    fresh.run(lambda group, rank: check(group, rank, fresh.n))


@runs_with("fresh", alone=False, wrappers=("managed", "error_swallowing"))
def test_a_peer_that_leaves_is_an_error_for_the_rest(fresh: Peers) -> None:
    fresh.connect()
    leaving = fresh.groups[2]
    works = [fresh.groups[rank].broadcast_one(values(rank), 2) for rank in (0, 1)]
    leaving.abort()
    results = in_threads([work.wait for work in works], TIMEOUT / 2)
    assert [type(result) for result in results] == [RuntimeError] * 2
    # The two remaining ranks continue.
    fresh.connect(fresh.groups[:2])
    on_ranks(2, lambda rank: check(fresh.groups[rank], rank, 2))


@runs_with("fresh", alone=False)
def test_an_abort_ends_operations_in_flight(fresh: Peers) -> None:
    """An abort ends operations at this rank and at its peers. With new peers the group works again."""
    fresh.connect()
    # Rank 1 waits for rank 0, whose connection breaks; a wait for rank 2 would not end.
    pending = [fresh.groups[rank].recv([values(rank)], source, 0) for rank, source in ((0, 2), (1, 0))]
    assert not any(work.is_completed() for work in pending)
    fresh.groups[0].abort()
    results = in_threads([lambda work=work: work.wait() for work in pending], TIMEOUT / 2)
    assert [type(result) for result in results] == [RuntimeError, RuntimeError]

    assert isinstance(fresh.groups[0].errored(), RuntimeError)
    fresh.connect()
    fresh.run(lambda group, rank: check(group, rank, fresh.n))
    assert fresh.groups[0].errored() is None


@runs_with("fresh", alone=False, wrappers=("managed",))
def test_timeouts(fresh: Peers) -> None:
    """The timeouts of the group, of an operation's options, and of a wait; no peer ever joins."""
    short = timedelta(milliseconds=100)

    def of_the_group(group: ProcessGroup) -> None:
        group.set_timeout(timedelta(milliseconds=700))
        group.broadcast_one(values(0), 1).wait()

    def of_the_options(group: ProcessGroup) -> None:
        opts = AllgatherOptions()
        opts.timeout = short
        group.allgather([[torch.zeros(4) for _ in range(fresh.n)]], [values(0)], opts).wait()

    def of_the_wait(group: ProcessGroup) -> None:
        group.recv([torch.zeros(1)], 1, 0).wait(short)

    for wait in (of_the_options, of_the_wait, of_the_group):
        fresh.connect()
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            wait(fresh.groups[0])


# A native group's receive keeps the deadline with which it was created.
@runs_with("fresh", alone=False, native=False, wrappers=())
def test_a_timeout_holds_for_the_next_peers_too(fresh: Peers) -> None:
    for seconds in (2, 10):  # also the timeout of connecting, which takes 1 s if a DNS answer is lost
        fresh.groups[0].set_timeout(timedelta(seconds=seconds))
        try:
            fresh.connect()
            break
        except RuntimeError:
            if seconds == 10:
                raise
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        fresh.groups[0].recv([torch.zeros(1)], 1, 0).wait()
    assert time.monotonic() - began < TIMEOUT.total_seconds() - 1, "the timeout with which the group was made"


@runs_with("fresh", alone=False)
@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=-1), 5], ids=str)
def test_a_bad_timeout_is_named(fresh: Peers, timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*: must be"):
        fresh.groups[0].set_timeout(timeout)
