"""PyTorch's own reconfigurable groups, and torchft's wrappers around them."""

from __future__ import annotations

from datetime import timedelta
from typing import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ReduceOp, TCPStore

from tests.unit.process_group.ranks import TIMEOUT, connect, in_threads, meeting, on_ranks
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupWrapper,
    ReconfigureOptions,
    create_store_client,
    is_native,
    native_error,
    reconfigure_with_store,
    supports_reconfigure,
)

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs PyTorch >= 2.14, whose groups can be reconfigured"
)


def natives(store: TCPStore, n: int) -> list[dist.ProcessGroup]:
    """What init_process_group(..., enable_reconfigure=True) makes in n ranks of a job, without its global state."""
    where = meeting(store)
    groups = []
    for rank in range(n):
        own = create_store_client(where, TIMEOUT)
        group = dist.ProcessGroup(own, rank, n)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(own, rank, n, timeout=TIMEOUT, enable_reconfigure=True)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        groups.append(group)
    return groups


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


def test_what_manager_asks(world: dist.ProcessGroup) -> None:
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


def test_a_wrapper_passes_new_peers_on(store: TCPStore) -> None:
    parents = natives(store, 2)
    groups: list[ProcessGroup] = [ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper(pg=pg)) for pg in parents]
    for group, parent in zip(groups, parents):
        assert supports_reconfigure(group) and not is_native(group)
        assert group.get_reconfigure_handle() == parent.get_reconfigure_handle()
        group.set_rank_info("replica", 0, 1)
        group.set_timeout(TIMEOUT)
    connect(groups, store)
    on_ranks(2, lambda rank: check(groups[rank], rank, 2))
    for group in groups:
        group.shutdown()  # the native groups are whoever's made them
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
