"""PyTorch's own reconfigurable groups, and torchft's wrappers around them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from typing import Callable, Iterator
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ReduceOp, TCPStore

from tests.promises import ABORT_S, within
from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, native, natives, on_ranks
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    ReconfigureOptions,
    create_store_client,
    is_native,
    native_error,
    reconfigure_with_store,
    supports_reconfigure,
)
from torchft.process_group import native as native_module
from torchft.process_group._gloo.connections import GlooConnections
from torchft.process_group.native import abort_group, connections_of, error_of_native, reconfigure_group

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"),
    reason="needs PyTorch >= 2.14, whose groups can be reconfigured",
)


def check(group: dist.ProcessGroup, rank: int, n: int) -> None:
    assert (group.size(), group.rank()) == (n, rank)
    tensor = torch.tensor([2.0**rank])
    group.allreduce([tensor], ReduceOp.SUM).wait()
    assert tensor.item() == 2.0**n - 1


@pytest.fixture
def world(store: TCPStore) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group(
        "gloo",
        store=PrefixStore(meeting(store), store),
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
        enable_reconfigure=True,
    )
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_properties_that_the_manager_reads(world: dist.ProcessGroup) -> None:
    assert supports_reconfigure(world)
    assert is_native(world)
    assert native_error(world) is None
    assert not hasattr(world, "set_rank_info")


def test_the_world_can_be_reconfigured(world: dist.ProcessGroup, store: TCPStore) -> None:
    for _ in range(2):
        reconfigure_with_store(world, meeting(store), 0, 1, TIMEOUT)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]


def test_fewer_and_more_and_other_ranks(store: TCPStore) -> None:
    groups = natives(store, 3)
    for members in ([0, 1, 2], [2, 0], [1, 2, 0]):
        chosen = [groups[m] for m in members]
        connect(chosen, store)
        on_ranks(len(chosen), lambda rank, chosen=chosen: check(chosen[rank], rank, len(chosen)))


def test_dropping_a_wrapper_does_not_wait_for_its_operations(store: TCPStore) -> None:
    """The thread on which the garbage collector runs must not wait. Gloo may not wake an operation whose
    connection breaks; the destruction of the group then takes until the timeout.
    """
    parents = natives(store, 2)
    groups = [ProcessGroupWrapper(pg=pg) for pg in parents]
    connect(groups, store)
    silent = parents.pop()
    parents.clear()
    groups.pop()
    work = groups[0].allreduce([torch.ones(1)], ReduceOp.SUM)
    began = time.monotonic()
    groups.clear()
    gc.collect()
    assert time.monotonic() - began < within(ABORT_S)
    abort_group(silent)
    with pytest.raises(RuntimeError):
        work.wait()


def test_an_operation_after_an_abort_ends_although_gloo_does_not_wake_it(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread may start an operation while another one aborts the group."""
    parents = natives(store, 2)
    group = ProcessGroupWrapper(pg=parents[0])
    connect([group, parents[1]], store)
    with monkeypatch.context() as forgetful:
        forgetful.setattr(GlooConnections, "shutdown", lambda self: setattr(self, "cut", True))
        abort_group(parents[0])
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="the connections with all peers are broken"):
            group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
        assert time.monotonic() - began < within(ABORT_S)
    connect(parents, store)
    on_ranks(2, lambda rank: check(parents[rank], rank, 2))


def test_a_wrapper_passes_on_new_peers(store: TCPStore) -> None:
    parents = natives(store, 2)
    groups: list[ProcessGroup] = [
        ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper(pg=pg)) for pg in parents
    ]
    for group, parent in zip(groups, parents):
        assert supports_reconfigure(group) and not is_native(group)
        assert group.get_reconfigure_handle() == parent.get_reconfigure_handle()
        group.set_rank_info("replica", 0, 1)
        group.set_timeout(TIMEOUT)
    connect(groups, store)
    on_ranks(2, lambda rank: check(groups[rank], rank, 2))
    for group in groups:
        group.shutdown()  # the native groups belong to their creator
    on_ranks(2, lambda rank: check(parents[rank], rank, 2))


def test_a_native_group_has_no_configure(store: TCPStore) -> None:
    with pytest.raises(RuntimeError, match="has no configure, only reconfigure"):
        ProcessGroupWrapper(pg=natives(store, 1)[0]).configure(meeting(store), "replica", 0, 1)


def test_torchft_handles_are_not_for_native_groups(store: TCPStore) -> None:
    opts = ReconfigureOptions()
    opts.uuid = 1
    opts.handles = [ProcessGroup(0, 1).get_reconfigure_handle()]
    with pytest.raises(RuntimeError, match="handle"):
        natives(store, 1)[0].reconfigure(opts).wait()


def test_a_peer_that_stays_away_is_an_error_in_time(store: TCPStore) -> None:
    groups = natives(store, 2)
    opts = ReconfigureOptions()
    opts.uuid = 1
    opts.handles = [group.get_reconfigure_handle() for group in groups]
    opts.timeout = timedelta(milliseconds=300)
    result = in_threads([lambda: groups[0].reconfigure(opts).wait()], TIMEOUT / 2)[0]
    assert isinstance(result, RuntimeError)


def test_managed_over_a_native_group(store: TCPStore) -> None:
    class Manager:
        def __init__(self, pg: dist.ProcessGroup) -> None:
            self._pg = pg

        def num_participants(self) -> int:
            return self._pg.size()

        def allreduce(self, tensor: torch.Tensor, reduce_op: ReduceOp) -> dist.Work:
            return self._pg.allreduce([tensor], reduce_op)

    parents = natives(store, 2)
    connect(parents, store)
    groups = [ManagedProcessGroup(Manager(pg)) for pg in parents]  # type: ignore[arg-type]
    assert groups[0].getBackendName() == "gloo"
    on_ranks(2, lambda rank: check(groups[rank], rank, 2))


def allreduce(group: dist.ProcessGroup) -> dist.Work:
    return group.allreduce([torch.ones(2)], ReduceOp.SUM)


def broadcast_of_the_first(group: dist.ProcessGroup) -> dist.Work:
    opts = dist.BroadcastOptions()
    opts.rootRank = 0
    return group.broadcast([torch.ones(2)], opts)


def stuck(
    groups: list[dist.ProcessGroup], each: int, start: Callable[[dist.ProcessGroup], dist.Work] = allreduce
) -> tuple[list[threading.Thread], list[Exception]]:
    """Starts threads that wait in collectives of these groups, whose last peer never joins. Returns them and
    the errors that they will raise.
    """
    errors: list[Exception] = []

    def run(group: dist.ProcessGroup) -> None:
        try:
            start(group).wait()
        except Exception as e:
            errors.append(e)

    threads = [
        threading.Thread(target=run, args=(group,), daemon=True) for group in groups for _ in range(each)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.05)
        assert thread.is_alive()
    return threads, errors


def ended(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + TIMEOUT.total_seconds() / 2
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "still waits in a collective"


def test_an_abort_ends_operations_in_flight_here_and_at_the_peers(store: TCPStore) -> None:
    groups = natives(store, 3)
    connect(groups, store)
    here, errors_here = stuck(groups[:1], each=4)
    # Not an allreduce, in which the peer might already wait only for the third rank, to which it is still
    # connected.
    there, errors_there = stuck(groups[1:2], each=4, start=broadcast_of_the_first)
    abort_group(groups[0])
    ended(here + there)
    assert len(errors_here) == len(errors_there) == 4
    for members in ([1, 0], [2, 0, 1]):
        chosen = [groups[m] for m in members]
        connect(chosen, store)
        on_ranks(len(chosen), lambda rank, chosen=chosen: check(chosen[rank], rank, len(chosen)))


def test_an_abort_cuts_the_world(world: dist.ProcessGroup, store: TCPStore) -> None:
    """init_process_group gives Gloo a prefix of the group's store, with new connections for each set of
    peers.
    """
    peer = native(world.get_group_store().clone(), 1, 2)
    for _ in range(2):
        connect([world, peer], store)
        assert all(connections_of(group) for group in (world, peer))
        threads, errors = stuck([world], each=1)
        abort_group(world)
        ended(threads)
        assert len(errors) == 1
    connect([world, peer], store)
    on_ranks(2, lambda rank: check([world, peer][rank], rank, 2))


def test_an_abort_cuts_a_group_with_its_own_store(store: TCPStore) -> None:
    """This applies to groups that are created without init_process_group."""
    where = meeting(store)
    groups = [native(create_store_client(where, TIMEOUT), rank, 2, prefix="") for rank in range(2)]
    connect(groups, store)
    threads, errors = stuck(groups[:1], each=1)
    abort_group(groups[1])
    ended(threads)
    assert len(errors) == 1


def test_new_peers_do_not_wait_for_the_old_ones(store: TCPStore) -> None:
    """Gloo has two threads per group, and operations that never end would block both of them."""
    groups = natives(store, 3)
    connect(groups, store)
    threads, errors = stuck(groups[:2], each=4)
    connect(groups[:2], store)
    ended(threads)
    assert len(errors) == 8
    on_ranks(2, lambda rank: check(groups[rank], rank, 2), TIMEOUT / 2)


def test_groups_made_with_the_same_rank_are_refused(store: TCPStore) -> None:
    groups = [natives(store, 1)[0] for _ in range(2)]
    opts = ReconfigureOptions()
    opts.uuid = 1
    opts.handles = [group.get_reconfigure_handle() for group in groups]
    with pytest.raises(ValueError, match=r"the same handle: .*give every replica group a rank of its own"):
        reconfigure_group(groups[0], opts)


def test_abort_twice_and_before_there_are_peers(store: TCPStore) -> None:
    groups = natives(store, 2)
    for _ in range(2):
        abort_group(groups[0])
    connect(groups, store)
    for _ in range(2):
        abort_group(groups[0])
    connect(groups, store)
    on_ranks(2, lambda rank: check(groups[rank], rank, 2))


def test_a_group_that_could_not_be_reconfigured_keeps_its_error(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = natives(store, 2)
    connect(groups, store)
    abort_group(groups[0])
    with monkeypatch.context() as failing:
        failing.setattr(
            native_module, "reconfigure_and_wait", MagicMock(side_effect=RuntimeError("no peer answers"))
        )
        with pytest.raises(RuntimeError, match="no peer answers"):
            connect(groups[:1], store)
    assert "was aborted" in str(error_of_native(groups[0]))
    connect(groups, store)
    assert error_of_native(groups[0]) is None


def test_a_wait_that_the_cut_ends_finds_the_abort(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = natives(store, 1)
    found: list[object] = []
    monkeypatch.setattr(native_module, "_cut", lambda pg: found.append(error_of_native(pg)))
    abort_group(group)
    assert len(found) == 1 and "was aborted" in str(found[0])


def test_a_reconfiguration_waits_for_an_abort_that_has_not_started_yet(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    (group,) = natives(store, 1)
    began: list[Future[None]] = []

    def cut(pg: dist.ProcessGroup) -> None:  # a reconfiguration calls it too
        if not began:
            began.append(pool.submit(connect, [group], store))
            wait(began, 0.2)
            assert not began[0].done()

    monkeypatch.setattr(native_module, "_cut", cut)
    with ThreadPoolExecutor(1) as pool:
        abort_group(group)
        began[0].result()
    assert error_of_native(group) is None


def test_aborts_of_two_threads_are_one(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reconfiguration waits for the end of one thread; another one would abort the new peers."""
    (group,) = natives(store, 1)
    both, over, started = threading.Barrier(2), threading.Event(), []

    def thread(name: str, pg: object) -> threading.Thread:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other thread, which must not come here
        started.append(threading.Thread(target=over.wait, args=(60,)))
        return started[-1]

    monkeypatch.setattr(native_module, "_abort_thread", thread)
    in_threads([lambda: abort_group(group)] * 2)
    over.set()
    assert len(started) == 1
    started[0].join()


def test_an_abort_during_a_reconfiguration_cuts_the_new_connections(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = natives(store, 2)
    reconfigure = native_module.reconfigure_and_wait

    def then_abort(pg: dist.ProcessGroup, opts: ReconfigureOptions) -> None:
        reconfigure(pg, opts)
        if pg is groups[0]:
            abort_group(pg)

    monkeypatch.setattr(native_module, "reconfigure_and_wait", then_abort)
    connect(groups, store)
    assert "was aborted" in str(error_of_native(groups[0]))
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        groups[1].allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    assert time.monotonic() - began < within(ABORT_S)


def test_reconfigure_and_abort_of_a_torchft_group(store: TCPStore) -> None:
    groups = [ProcessGroupGloo(timeout=TIMEOUT) for _ in range(2)]
    opts = ReconfigureOptions()
    opts.uuid = 1
    opts.handles = [group.get_reconfigure_handle() for group in groups]
    on_ranks(2, lambda rank: reconfigure_group(groups[rank], opts))
    on_ranks(2, lambda rank: check(groups[rank], rank, 2))
    abort_group(groups[0])
    assert groups[0].errored() is not None
    for group in groups:
        group.shutdown()


def test_a_destroyed_group_is_forgotten(store: TCPStore) -> None:
    group = natives(store, 1)[0]
    connect([group], store)
    watch = weakref.ref(group)
    del group
    gc.collect()
    assert watch() is None
