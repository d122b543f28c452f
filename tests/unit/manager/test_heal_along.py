"""The choice between a heal in pieces and a transfer as a whole, and the Manager's calls of a heal in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.test_joining import DEADLINE_SEC, plan
from torchft._manager.heal_along import Along


@pytest.mark.parametrize("step", [0, 1])
def test_at_step_0_the_state_is_transferred_as_a_whole(step: int) -> None:
    """At step 0 the initial weights of the groups differ, so all groups wait for the transfer before they train."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    transport = MagicMock(gives_pieces=True)
    along = Along(
        transport, [optimizer], dict, str, lambda: None, MagicMock(), DEADLINE_SEC, additional=3, logger=MagicMock()
    )
    of_source = cast(Any, SimpleNamespace(max_step=step, in_background=True))
    assert along.offer(of_source, whole=lambda: None) == (step > 0)
    assert transport.offer_pieces.called == (step > 0)
    try:
        assert along.join(plan(step, "source"), may_write=True) == along.joining == (step > 0)
    finally:
        along.stop()


def test_the_first_reduction_ends_a_pass(fixture: Fixture) -> None:
    manager = fixture.manager(heal_along=True)
    assert manager._along is not None
    manager.start_quorum()
    manager.wait_quorum()
    manager._along._target = target = MagicMock()
    manager.allreduce(torch.ones(2)).wait()
    target.pace.reduces.assert_called_once()
