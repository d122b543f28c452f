"""One rank's Manager without a cluster: the test determines its client's answers, and its process group is a
dummy.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Callable, Iterator
from unittest.mock import MagicMock, create_autospec, patch

import pytest
from torch.distributed import TCPStore

from torchft._torchft import QuorumResult
from torchft.checkpointing import CheckpointTransport
from torchft.manager import MANAGER_ADDR_KEY, REPLICA_ID_KEY, Manager
from torchft.process_group import ProcessGroupDummy


class Fixture:
    """A Manager under test, with its test doubles."""

    def __init__(self, store: TCPStore, client_class: MagicMock) -> None:
        self._store = store
        self.client = client_class.return_value
        self.client_class = client_class
        self.client._quorum.return_value = quorum()
        self.client._checkpoint_metadata.return_value = "where"
        # The group votes as this rank does
        self.client.should_commit.side_effect = lambda rank, step, vote, timeout: vote
        self.transport = create_autospec(CheckpointTransport, instance=True)
        self.transport.metadata.return_value = "http://me/checkpoint/"
        self.loaded: list[Any] = []
        self.managers: list[Manager] = []
        self.pg = ProcessGroupDummy(0, 1)

    def manager(self, **given: Any) -> Manager:
        self._store.set(MANAGER_ADDR_KEY, "http://manager:1")
        self._store.set(REPLICA_ID_KEY, "group_1:uuid")
        settings: dict[str, Any] = dict(
            pg=self.pg,
            load_state_dict=self.loaded.append,
            state_dict=lambda: {"weights": 1},
            min_replica_size=1,
            rank=1,
            world_size=2,
            store_addr="localhost",
            store_port=self._store.port,
            timeout=timedelta(seconds=10),
            checkpoint_transport=self.transport,
        )
        manager = Manager(**{**settings, **given})
        self.managers.append(manager)
        return manager

    def votes(self) -> list[bool]:
        return [call.args[2] for call in self.client.should_commit.call_args_list]


def quorum(**fields: Any) -> QuorumResult:
    """Makes a quorum of two groups, both at step 0, this one the second; ``fields`` override its fields."""
    result = QuorumResult()
    values: dict[str, Any] = dict(
        quorum_id=1,
        replica_rank=1,
        replica_world_size=2,
        store_address="store:1",
        max_replica_rank=1,
        max_world_size=2,
        replica_ids=["group_0:uuid", "group_1:uuid"],
    )
    for name, value in {**values, **fields}.items():
        setattr(result, name, value)
    return result


@pytest.fixture
def fixture() -> Iterator[Fixture]:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with patch("torchft.manager.ManagerClient", autospec=True) as client_class:
        built = Fixture(store, client_class)
        yield built
        for manager in built.managers:
            manager.shutdown()


@pytest.fixture
def make_quorum() -> Callable[..., QuorumResult]:
    return quorum
