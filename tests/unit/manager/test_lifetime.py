"""Managers that nobody shuts down: the earlier one of a group in a process, and one without references."""

from __future__ import annotations

import gc
import json
import threading
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from processes import free_port
from torch import nn
from torch.distributed import TCPStore

from tests.unit.waiting import wait_until
from torchft._manager.lifetime import Life, began, earlier, ended, life_of
from torchft.checkpointing import HTTPTransport
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.local_sgd import LocalSGD
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ManagedProcessGroup, ProcessGroupGloo
from torchft.process_group.reconfigure import host_store
from torchft.utils import weakly

MINUTE = timedelta(seconds=60)


class Host:
    """A lighthouse, and a process that makes Managers with it."""

    def __init__(self) -> None:
        # A member that is healthy and does not ask would delay a quorum for longer than a test may take.
        self.lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=600_000)
        self.store = host_store(MINUTE)[0]
        self.groups: list[ProcessGroupGloo] = []

    def manager(
        self, replica_id: str | None = "group", store: TCPStore | None = None, **given: Any
    ) -> Manager:
        self.groups.append(ProcessGroupGloo(timeout=MINUTE))
        settings: dict[str, Any] = dict(
            pg=self.groups[-1],
            load_state_dict=lambda state: None,
            state_dict=lambda: {"weights": 1},
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=(store or self.store).port,
            lighthouse_addr=self.lighthouse.address(),
            replica_id=replica_id,
            timeout=MINUTE,
        )
        return Manager(**{**settings, **given})

    def healthy(self) -> int:
        with urllib.request.urlopen(f"{self.lighthouse.address()}/status", timeout=60) as answer:
            return json.load(answer)["healthy"]


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    for group in host.groups:
        group.shutdown()
    host.lighthouse.shutdown()


def threads() -> set[threading.Thread]:
    """The threads of Managers; those of the process (timers, say) stay."""
    ours = ("torchft_quorum", "torchft_failures", "torchft-checkpoint-server", "torchft_heal_along")
    return {thread for thread in threading.enumerate() if thread.name in ours}


def step(manager: Manager) -> None:
    manager.start_quorum()
    manager.allreduce(torch.ones(2)).wait()
    assert manager.should_commit()


# An earlier Manager of the same group


def life(replica_id: str = "a", rank: int = 0, lighthouse: str = "http://l:1", store: str = "s") -> Life:
    settings: Any = SimpleNamespace(
        group_rank=rank, lighthouse_addr=lighthouse, store_addr=store, store_port=1
    )
    return life_of(replica_id, settings)


@pytest.mark.parametrize(
    ("earlier", "repeats"),
    [
        (life(), True),
        (life(store="t"), True),  # the name decides: a script that starts again makes another store
        (life(replica_id="b"), False),
        (life(rank=1), False),
        (life(lighthouse="http://l:2"), False),
    ],
)
def test_a_group_is_the_same_by_its_name_rank_and_lighthouse(earlier: Life, repeats: bool) -> None:
    assert (life() == earlier) is repeats


def test_groups_without_a_name_are_told_apart_by_their_stores() -> None:
    assert life("") == life("")
    assert life("") != life("", store="t") and life("") != life("a")


def test_only_the_same_thread_or_after_the_end_of_a_thread_replaces_a_manager() -> None:
    manager, gate = MagicMock(), threading.Event()

    def make() -> None:
        began(manager, life())
        gate.wait()

    began(manager, life())
    assert earlier(life()) == [manager]
    maker = threading.Thread(target=make)
    maker.start()
    wait_until(lambda: earlier(life()) == [])
    gate.set()
    maker.join()
    assert earlier(life()) == [manager]
    ended(manager)
    assert earlier(life()) == []


def test_a_cell_that_runs_again_ends_its_earlier_manager(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    first = host.manager()
    step(first)
    again = host.manager(store=host_store(MINUTE)[0])
    step(again)  # without the first one's end it would wait for the join timeout
    assert host.healthy() == 1
    (line,) = [r.getMessage() for r in caplog.records if "was not shut down" in r.getMessage()]
    assert first._replica_id in line and "another one of its group" in line
    with pytest.raises(RuntimeError, match="the Manager is shut down"):
        first.start_quorum()
    first.shutdown()
    again.shutdown()


def test_the_port_of_an_earlier_manager_is_free_for_the_next_one(host: Host) -> None:
    port = free_port()
    host.manager(port=port)
    again = host.manager(port=port)
    step(again)
    again.shutdown()


def test_a_transport_that_the_next_manager_is_given_too_goes_on_to_serve(host: Host) -> None:
    transport: HTTPTransport[Any] = HTTPTransport(timeout=MINUTE, num_chunks=0)
    host.manager(checkpoint_transport=transport)
    again = host.manager(checkpoint_transport=transport)
    transport.send_checkpoint([0], 0, {"weights": torch.ones(2)}, MINUTE)
    assert transport.recv_checkpoint(0, transport.metadata(), 0, MINUTE)["weights"].tolist() == [1, 1]
    again.shutdown()


def test_a_manager_that_was_shut_down_is_not_named(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.manager().shutdown()
    host.manager().shutdown()
    assert not [r for r in caplog.records if "was not shut down" in r.getMessage()]


def test_groups_of_one_name_on_threads_of_their_own_are_left_alone_and_named(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Manager] = []
    gate = threading.Event()

    def replica() -> None:
        made.append(host.manager())
        gate.wait()
        made[0].start_quorum()

    other = threading.Thread(target=replica, name="replica 1")
    other.start()
    wait_until(lambda: made)
    mine = host.manager()
    (line,) = [r.getMessage() for r in caplog.records if "another Manager" in r.getMessage()]
    assert made[0]._replica_id in line and "replica 1" in line and "replica_id" in line
    gate.set()
    mine.start_quorum()
    other.join()
    for manager in (mine, made[0]):
        assert manager.num_participants() == 2
        manager.shutdown()


# A Manager without references


def plain(manager: Manager, model: nn.Module) -> nn.Module:
    return model


def pytorchs_ddp(manager: Manager, model: nn.Module) -> nn.Module:
    group = ManagedProcessGroup(manager)
    return nn.parallel.DistributedDataParallel(model, process_group=group, find_unused_parameters=True)


def local_sgd(manager: Manager, model: nn.Module) -> nn.Module:
    model.sgd = LocalSGD(manager, model, torch.optim.SGD(model.parameters(), 0.1), sync_every=1)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        plain,
        DistributedDataParallel,
        lambda manager, model: DistributedDataParallel(manager, model, static_graph=True),
        PureDistributedDataParallel,
        pytorchs_ddp,
        local_sgd,
    ],
    ids=["plain", "ddp", "static graph", "pure ddp", "PyTorch's ddp", "local sgd"],
)
@pytest.mark.parametrize("ends", ["between two steps", pytest.param("within a step", marks=pytest.mark.slow)])
def test_a_manager_without_references_ends(
    host: Host, wrap: Callable[[Manager, nn.Module], nn.Module], ends: str
) -> None:
    before = threads()

    def train() -> weakref.ref[Manager]:
        model, optimizer = nn.Module(), None  # the state functions keep what keeps the Manager
        manager = host.manager(
            load_state_dict=lambda state: model.load_state_dict(state),
            state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        )
        model = wrap(manager, nn.Linear(2, 2))
        optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), 0.1))
        for last in (False, True):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            if not last or ends == "between two steps":
                optimizer.step()
        return weakref.ref(manager)

    manager = train()
    # more than once, because a thread that ends an operation may still refer to a step
    wait_until(lambda: gc.collect() >= 0 and threads() <= before)
    wait_until(lambda: host.healthy() == 0)
    wait_until(lambda: gc.collect() >= 0 and manager() is None)


def test_a_method_is_not_kept_alive_and_a_function_is() -> None:
    class Object:
        def method(self) -> int:
            return 1

    thing = Object()
    method, function = weakly(thing.method), weakly(lambda: 2)
    call = method()
    assert call is not None and call() == 1
    del thing, call
    gc.collect()
    assert method() is None
    kept = function()
    assert kept is not None and kept() == 2
