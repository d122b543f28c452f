"""The methods of a Manager that torchft's wrappers use besides the public ones; a stand-in may lack them."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from tests.unit.manager.conftest import Fixture
from torchft._extras import Extras, extras_of
from torchft._manager.stepping import OwnExtras
from torchft.manager import Manager


def test_the_extras_of_a_manager(fixture: Fixture) -> None:
    manager = fixture.manager(replay_failed_step=True)
    extras = extras_of(manager)
    assert not extras.has_peers and not extras.adds_gradients
    manager.start_quorum()
    manager.wait_quorum()
    assert extras.has_peers
    extras.refuse_replay("it cannot be repeated")
    assert manager._current.inputs.refused == "it cannot be repeated"
    fixture.pg.share_buffer = MagicMock()  # type: ignore[method-assign]
    extras.share_buffer(buffer := torch.ones(1))
    fixture.pg.share_buffer.assert_called_once_with(buffer)


def test_a_manager_implements_all_extras() -> None:
    assert {name for name in vars(Extras) if not name.startswith("_")} <= vars(OwnExtras).keys()


@pytest.mark.parametrize("stand_in", [object(), MagicMock(), create_autospec(Manager, instance=True)])
def test_the_extras_of_a_stand_in(stand_in: object) -> None:
    extras = extras_of(stand_in)
    assert extras.has_peers and not extras.adds_gradients
    extras.refuse_replay("it cannot be repeated")
    extras.register_gradients(list)
    extras.register_check(list)
    extras.check_sparse(["weight"])
    extras.steps_by_itself(object())
    extras.inner_step_ended()
    extras.share_buffer(torch.ones(1))
    extras.counted("nonfinite_syncs")


def test_a_stand_in_with_a_quorum_id() -> None:
    stand_in = SimpleNamespace(_quorum_id=-1)
    extras = extras_of(stand_in)
    assert not extras.has_peers
    stand_in._quorum_id = 3
    assert extras.has_peers
