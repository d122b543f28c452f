"""The start of a group: how its ranks find their manager server."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Iterator, List
from unittest.mock import MagicMock

import pytest
from torch.distributed import TCPStore

from torchft._manager.quorum import group
from torchft._manager.settings import resolve

RANKS = 4
WAIT = timedelta(seconds=60)


class CountingStore:
    """A rank's connection to the group's store, which counts its operations."""

    def __init__(self, port: int) -> None:
        self._store = TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=WAIT)
        self.operations: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.operations[name] += 1
        return getattr(self._store, name)


def join(rank: int, server: Any) -> group.Group:
    """Starts one rank of a group."""
    settings = resolve(
        dict(
            rank=rank,
            world_size=RANKS,
            store_addr="localhost",
            store_port=1,
            lighthouse_addr="http://localhost:1",
            port=None,
            timeout=WAIT,
            quorum_timeout=WAIT,
            connect_timeout=WAIT,
            heartbeat_interval=timedelta(milliseconds=100),
            quorum_retries=0,
        )
    )
    return group.join_group(settings, "g", "host", start_server=lambda **given: server)


def started(opened: List[CountingStore], server: Any) -> dict[int, group.Group]:
    """Starts all ranks of a group in parallel."""

    # Rank 0 starts last, so that the others ask before the store has the answer.
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = list(reversed(range(RANKS)))
        return dict(zip(ranks, pool.map(lambda rank: join(rank, server), ranks)))


@pytest.fixture
def server() -> Any:
    server = MagicMock()
    server.address.return_value = "http://host:1"
    return server


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[List[CountingStore]]:
    """Replaces the stores of the ranks by stores that count operations."""
    master = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stores: List[CountingStore] = [CountingStore(master.port) for _ in range(RANKS)]
    monkeypatch.setattr(group, "_open_store", lambda settings: stores[settings.group_rank])
    yield stores
    del master  # the server is needed until here


def test_a_start_costs_a_rank_two_store_operations(opened: List[CountingStore], server: Any) -> None:
    joined = started(opened, server)
    for rank, store in enumerate(opened):
        assert 1 <= store.operations.total() <= 2, f"rank {rank}: {store.operations}"
        assert joined[rank].manager_address == "http://host:1"
        assert joined[rank].replica_id == joined[0].replica_id
        assert joined[rank].replica_id.startswith("g:")
        assert (joined[rank].server is server) == (rank == 0)


def test_a_wait_for_the_store_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, a wrong MASTER_ADDR: PyTorch says nothing until the timeout."""
    lines: List[str] = []
    announced = threading.Event()

    def open_store(**_: Any) -> MagicMock:
        assert announced.wait(60)
        return MagicMock()

    monkeypatch.setattr(group, "TCPStore", open_store)
    monkeypatch.setattr(group, "_SILENT_SEC", 0.0)
    monkeypatch.setattr(group._logger, "warning", lambda text: (lines.append(text), announced.set()))
    settings: Any = SimpleNamespace(store_addr="node7", store_port=29500, timeout=WAIT, restart_count=0)
    group._open_store(settings)
    assert lines == [
        "waiting for the store of this group at node7:29500 (MASTER_ADDR, MASTER_PORT), which torchrun serves"
    ]
