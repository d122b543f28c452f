"""Heals on the test device: into the tensors that are there, on the target's own devices, with little beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.integration.cluster import DEADLINE, Rank
from tests.integration.heal_memory import check_heal
from tests.late import load
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroup

load()
from tests.late.group import ProcessGroupLate  # noqa: E402


def http(rank: Rank) -> CheckpointTransport[Any]:
    return HTTPTransport(DEADLINE, 0)


def by_group(rank: Rank) -> CheckpointTransport[Any]:
    return PGTransport(rank.pg, DEADLINE, torch.device("late", rank.group))


def late_pg(group: int) -> ProcessGroup:
    return ProcessGroupLate(timeout=DEADLINE)


@pytest.mark.parametrize("transport", [http, by_group])
@pytest.mark.parametrize("in_background", [True, False], ids=["asynchronous quorum", "synchronous quorum"])
@pytest.mark.parametrize("has_stepped", [True, False], ids=["own Adam", "fresh Adam"])
def test_a_heal_takes_no_second_copy_on_the_device(
    late: Any, transport: Callable[[Rank], CheckpointTransport[Any]], in_background: bool, has_stepped: bool
) -> None:
    late.delays(5, 0, 200)
    devices = torch.device("late", 0), torch.device("late", 1)
    check_heal(late_pg, transport, devices, width=1024, in_background=in_background, has_stepped=has_stepped)
