"""How the ranks of a group find each other."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, List
from unittest.mock import MagicMock

import pytest
from torch.distributed import TCPStore

from torchft._manager import group
from torchft._manager.settings import resolve

RANKS = 4
WAIT = timedelta(seconds=60)


class CountingStore:
    """A rank's connection to the group's store, whose operations are counted."""

    def __init__(self, port: int) -> None:
        self._store = TCPStore("localhost", port, is_master=False, wait_for_workers=False, timeout=WAIT)
        self.operations: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.operations[name] += 1
        return getattr(self._store, name)


def test_a_start_costs_a_rank_two_store_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    master = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    opened: List[CountingStore] = [CountingStore(master.port) for _ in range(RANKS)]
    monkeypatch.setattr(group, "_open_store", lambda settings: opened[settings.group_rank])
    server = MagicMock()
    server.address.return_value = "http://host:1"

    def join(rank: int) -> group.Group:
        settings = resolve(
            rank=rank,
            world_size=RANKS,
            store_addr="localhost",
            store_port=master.port,
            lighthouse_addr="http://localhost:1",
            port=None,
            timeout=WAIT,
            quorum_timeout=WAIT,
            connect_timeout=WAIT,
            heartbeat_interval=timedelta(milliseconds=100),
            quorum_retries=0,
        )
        return group.join_group(settings, "g", "host", start_server=lambda **given: server)

    # Rank 0 is last, so that the others ask before there is an answer.
    with ThreadPoolExecutor(RANKS) as pool:
        ranks = list(reversed(range(RANKS)))
        joined = dict(zip(ranks, pool.map(join, ranks)))

    for rank, store in enumerate(opened):
        assert 1 <= store.operations.total() <= 2, f"rank {rank}: {store.operations}"
        assert joined[rank].manager_address == "http://host:1"
        assert joined[rank].replica_id == joined[0].replica_id
        assert joined[rank].replica_id.startswith("g:")
        assert (joined[rank].server is server) == (rank == 0)
