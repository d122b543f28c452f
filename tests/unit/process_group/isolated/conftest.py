"""Isolated groups, alone and with a plain peer. Their workers end with the test."""

from __future__ import annotations

from typing import Iterator

import pytest
from torch.distributed import TCPStore

from tests.unit.process_group.isolated.processes import wait_until, workers
from tests.unit.process_group.ranks import TIMEOUT, connect, meeting
from torchft.process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo
from torchft.process_group.isolated import standby


@pytest.fixture(autouse=True)
def all_workers_end() -> Iterator[None]:
    yield
    if standby.servers._server is not None:
        wait_until(lambda: not workers(), "the processes of the test end")


@pytest.fixture
def alone(store: TCPStore) -> Iterator[ProcessGroupBabyGloo]:
    """A group of one rank, whose operations are sent to its worker nevertheless."""
    group = ProcessGroupBabyGloo(TIMEOUT)
    group.configure(meeting(store), "replica", 0, 1)
    yield group
    group.shutdown()


@pytest.fixture
def pair(store: TCPStore) -> Iterator[list[ProcessGroup]]:
    """A plain group and an isolated one, connected with each other."""
    groups: list[ProcessGroup] = [ProcessGroupGloo(TIMEOUT), ProcessGroupBabyGloo(TIMEOUT)]
    connect(groups, store)
    yield groups
    for group in groups:
        group.shutdown()
