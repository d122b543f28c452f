"""The choice between a heal in pieces and a transfer as a whole, and the Manager's calls of a heal in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.test_joining import DEADLINE_SEC, plan
from torchft._agreement import HEALS, announced
from torchft._manager import heal_along
from torchft._manager.giving import Giver
from torchft._manager.heal_along import Along
from torchft._manager.tracked import Parameters


def plan_of_source(step: int) -> Any:
    return SimpleNamespace(
        max_step=step, in_background=True, heal=False, up_to_date=True, num_up_to_date=1, replica_world_size=2
    )


@pytest.mark.parametrize("step", [0, 1])
def test_at_step_0_the_state_is_transferred_as_a_whole(step: int) -> None:
    """At step 0 the initial weights of the groups differ, so all groups wait for the transfer before they train."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    transport = MagicMock(gives_pieces=True)
    along = Along(
        transport, [optimizer], str, lambda: None, MagicMock(), DEADLINE_SEC, additional=3, logger=MagicMock()
    )
    of_source = plan_of_source(step)
    along.follow(of_source)
    assert along.offer(of_source, dict, whole=lambda: None) == (step > 0)
    assert transport.offer_pieces.called == (step > 0)
    try:
        assert along.join(plan(step, "source"), may_write=True) == along.joining == (step > 0)
    finally:
        along.stop()


@pytest.mark.parametrize("why", ["", "it does not heal", "it heals at step 0", "its optimizer has changed"])
def test_what_is_prepared_before_the_first_quorum_is_used_for_one_heal(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    made: list[Parameters] = []

    def make(optimizers: Any) -> Parameters:
        made.append(Parameters(optimizers))
        return made[-1]

    monkeypatch.setattr(heal_along, "Parameters", make)
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    along = Along(
        MagicMock(gives_pieces=True), [optimizer], str, lambda: None, MagicMock(), DEADLINE_SEC, 3, MagicMock()
    )
    along.prepare()
    assert made[0]._memory._prepared
    if why == "it does not heal":
        along.follow(plan_of_source(1))
    if why == "it heals at step 0":
        assert not along.join(plan(0, "source"), may_write=True)
    if why == "its optimizer has changed":
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    try:
        assert (along._prepared is None) == (why.startswith("it "))
        assert along.join(plan(1, "source"), may_write=True)
        assert along._target is not None and along._target._parameters is made[bool(why)]
        assert along._prepared is None
    finally:
        along.stop()


def test_nothing_is_prepared_where_groups_do_not_train_along() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    along = Along(
        MagicMock(gives_pieces=True), [optimizer], str, lambda: "why", MagicMock(), DEADLINE_SEC, 3, MagicMock()
    )
    along.prepare()
    assert along._prepared is None


def test_the_manager_prepares_before_its_first_request(fixture: Fixture) -> None:
    manager = fixture.manager(heal_along=True)
    assert manager._along is not None and manager._rounds is not None
    calls: list[str] = []
    begin = manager._rounds.begin

    def recorded(*args: Any) -> Any:
        calls.append("begin")
        return begin(*args)

    manager._along.prepare = lambda: calls.append("prepare")  # type: ignore[method-assign]
    manager._rounds.begin = recorded  # type: ignore[method-assign]
    for _ in range(2):
        manager.start_quorum()
        manager.wait_quorum()
    assert calls == ["prepare", "begin", "begin"]


@pytest.mark.parametrize("heal", ["at_once", "in_passing", "auto"])
def test_the_groups_wait_for_those_that_heal_in_every_mode(fixture: Fixture, heal: str) -> None:
    """A heal in passing may become one at once, so that each group has to know that the others wait."""
    manager = fixture.manager(heal=heal)
    manager.start_quorum()
    manager.wait_quorum()
    handle = fixture.client._quorum.call_args.kwargs["reconfigure_handle"]
    assert announced(handle, HEALS)


@pytest.mark.parametrize("reason", ["no OptimizerWrapper", "its step fails"])
def test_what_cannot_be_prepared_is_no_error(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    optimizer, logger = torch.optim.Adam(nn.Linear(2, 2).parameters()), MagicMock()
    if reason == "its step fails":
        monkeypatch.setattr(torch.optim.Adam, "step", MagicMock(side_effect=RuntimeError(reason)))
    optimizers = [optimizer] if reason == "its step fails" else []
    along = Along(MagicMock(gives_pieces=True), optimizers, str, lambda: None, MagicMock(), DEADLINE_SEC, 3, logger)
    along.prepare()
    assert reason in logger.info.call_args.args[0] and along._prepared is None


def test_a_source_describes_its_parameters_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other groups train meanwhile: with thousands of parameters a description takes some milliseconds."""
    described = MagicMock(return_value={"layout": "", "hyperparameters": []})
    monkeypatch.setattr(heal_along, "head", described)
    along = Along(MagicMock(gives_pieces=True), [], str, lambda: None, MagicMock(), DEADLINE_SEC, 3, MagicMock())
    for step in (1, 2):
        along.follow(plan_of_source(step))
        assert along.offer(plan_of_source(step), dict, whole=lambda: None)
        assert described.call_count == step


@pytest.mark.parametrize("argument", ["2-0-0", "0-0-5", "0-3-2"])
def test_a_piece_that_does_not_exist_is_refused(argument: str) -> None:
    giver = Giver([torch.optim.SGD(nn.Linear(2, 2).parameters())], dict, lambda: None)
    assert giver.give("piece", "1-0-2")[1][0].numel() == 8
    with pytest.raises(ValueError, match="there are no elements"):
        giver.give("piece", argument)


def test_the_first_reduction_ends_a_pass(fixture: Fixture) -> None:
    manager = fixture.manager(heal_along=True)
    assert manager._along is not None
    manager.start_quorum()
    manager.wait_quorum()
    manager._along._target = target = MagicMock()
    manager.allreduce(torch.ones(2)).wait()
    target.pace.reduces.assert_called_once()
