"""The choice between a heal in passing and one at once, and the Manager's calls of a heal in passing."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from tests.unit.manager.conftest import Fixture
from tests.unit.manager.test_joining import DEADLINE_SEC, plan
from torchft._agreement import HEALS, announced
from torchft._manager.heal import in_passing
from torchft._manager.heal.in_passing import Fetch, InPassing
from torchft._manager.heal.mode import LITTLE
from torchft._manager.heal.step_parts import StepParts
from torchft._manager.heal.tracked import Parameters
from torchft._manager.settings import HealMode
from torchft.checkpointing import HTTPTransport


def plan_of_source(step: int) -> Any:
    return SimpleNamespace(max_step=step, quorum_id=3, heal=False, recover_dst=[1])


def heals_of(
    optimizers: Any, transport: Any = None, logger: Any = None, refuses: Any = None, chooses: bool = False
) -> InPassing:
    transport, logger = transport or MagicMock(gives_parts=True), logger or MagicMock()
    heals = InPassing(
        transport, optimizers, str, refuses or (lambda: None), MagicMock(), DEADLINE_SEC, logger, 1
    )
    heals.heal_by(HealMode.AUTO if chooses else HealMode.IN_PASSING)
    return heals


@pytest.mark.parametrize("step", [0, 1])
def test_at_step_0_the_state_is_transferred_at_once(step: int) -> None:
    """At step 0 the initial weights of the groups differ, so all groups wait for the transfer before they
    train.
    """
    transport = MagicMock(gives_parts=True)
    heals = heals_of([torch.optim.SGD(nn.Linear(2, 2).parameters())], transport)
    of_source = plan_of_source(step)
    heals.follow(of_source)
    assert heals.offer(of_source, whole=lambda: None) == (step > 0)
    assert transport.offer_parts.called == (step > 0)
    heals.decided(True)
    assert transport.note_decision.called == (step > 0)
    try:
        fetch = heals.join(plan(step), may_write=True)
        assert (fetch is Fetch.NOTHING) == heals.joining == (step > 0)
    finally:
        heals.stop()


def test_a_heal_that_begins_during_a_shutdown_ends() -> None:
    """The quorum thread may follow a quorum meanwhile. No part is put in place after the shutdown."""
    heals = heals_of([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    heals.close()
    assert heals.join(plan(1), may_write=True) is Fetch.ALL
    assert not heals.joining and heals._target is None
    heals = heals_of([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    assert heals.join(plan(1), may_write=True) is Fetch.NOTHING
    assert heals._target is not None
    thread = heals._target._thread
    heals.close()
    thread.join(20)
    assert not thread.is_alive()


LARGE = LITTLE // 12 + 1  # elements with Adam


@pytest.mark.parametrize(
    ("chooses", "elements", "groups", "reason"),
    [
        (True, LARGE, 2, ""),
        (True, LARGE, 1, "one group alone has it"),
        (True, 100, 2, "it has about 0.0 MB"),
        (False, 100, 1, ""),
    ],
)
def test_what_auto_decides_before_a_heal(chooses: bool, elements: int, groups: int, reason: str) -> None:
    logger = MagicMock()
    optimizers = [torch.optim.Adam([nn.Parameter(torch.zeros(elements))])]
    heals = heals_of(optimizers, logger=logger, chooses=chooses)
    try:
        decided = plan(1)
        decided.num_up_to_date = groups
        assert (heals.join(decided, may_write=True) is Fetch.NOTHING) == heals.joining == (not reason)
        assert not logger.warn.called, "it is no failure"
        assert not reason or reason in logger.info.call_args.args[0]
        assert (heals.why_not() is None) == (reason.startswith("one group") or not reason)
    finally:
        heals.stop()


def test_auto_looks_again_when_there_is_another_optimizer() -> None:
    optimizers: list[Any] = []
    heals = heals_of(optimizers, chooses=True)
    assert heals.why_not() == "no OptimizerWrapper of this Manager shows which tensors are parameters"
    optimizers.append(torch.optim.Adam([nn.Parameter(torch.zeros(LARGE))]))
    assert heals.why_not() is None


def test_a_source_that_announces_no_parts_is_asked_for_none() -> None:
    """At the begin of a heal, and later: it has reached the end of its data meanwhile."""
    heals = heals_of([torch.optim.SGD(nn.Linear(2, 2).parameters())])
    at_end = plan(1)
    at_end.gives_parts = False
    assert heals.join(at_end, may_write=True) is Fetch.ALL
    heals.healed()
    try:
        assert heals.join(plan(2), may_write=True) is Fetch.NOTHING
        assert heals.join(at_end, may_write=True) is Fetch.ALL and not heals.joining
    finally:
        heals.stop()


@pytest.mark.parametrize("reason", ["LocalSGD", "the optimizer is SGD2"])
def test_a_source_that_gives_no_parts_tells_its_targets_why(reason: str) -> None:
    class SGD2(torch.optim.SGD):
        pass

    transport = MagicMock(gives_parts=True)
    kind = SGD2 if "SGD2" in reason else torch.optim.SGD
    heals = heals_of(
        [kind(nn.Linear(2, 2).parameters())],
        transport,
        refuses=lambda: reason if reason == "LocalSGD" else None,
    )
    heals.follow(plan_of_source(1))
    assert not heals.offer(plan_of_source(1), whole=lambda: None)
    step, said = transport.refuse_parts.call_args.args
    assert step == 1 and reason in said
    heals.decided(True)
    transport.note_decision.assert_called_once_with(
        1, 3, None
    )  # before the step: a target does not wait for it
    assert not transport.offer_parts.called


@pytest.mark.parametrize("why", ["", "it does not heal", "it heals at step 0", "its optimizer has changed"])
def test_what_is_prepared_before_the_first_quorum_is_used_for_one_heal(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    made: list[Parameters] = []

    def make(optimizers: Any) -> Parameters:
        made.append(Parameters(optimizers))
        return made[-1]

    monkeypatch.setattr(in_passing, "Parameters", make)
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    heals = heals_of([optimizer])
    heals.prepare()
    assert made[0]._memory._prepared
    if why == "it does not heal":
        heals.follow(plan_of_source(1))
    if why == "it heals at step 0":
        heals.follow(SimpleNamespace(max_step=0, heal=True))  # type: ignore[arg-type]
    if why == "its optimizer has changed":
        optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    try:
        assert heals.join(plan(1), may_write=True) is Fetch.NOTHING
        assert (
            heals._target is not None and heals._target.parameters is made[why == "its optimizer has changed"]
        )
        assert bool(heals._target.parameters._memory._prepared) == (not why)
    finally:
        heals.stop()


def test_nothing_is_prepared_where_groups_do_not_train_along() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    heals = heals_of([optimizer], refuses=lambda: "why")
    heals.prepare()
    assert heals._known is None


def test_the_manager_prepares_before_its_first_request(fixture: Fixture) -> None:
    transport = HTTPTransport[Any](timedelta(seconds=DEADLINE_SEC), 0)
    manager = fixture.manager(heal_along=True, checkpoint_transport=transport)
    assert manager._rounds is not None
    calls: list[str] = []
    begin = manager._rounds.begin

    def recorded(*args: Any) -> Any:
        calls.append("begin")
        return begin(*args)

    manager._in_passing.prepare = lambda: calls.append("prepare")  # type: ignore[method-assign]
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
    heals = heals_of(optimizers, logger=logger)
    heals.prepare()
    assert reason in logger.info.call_args.args[0]


@pytest.mark.parametrize("decided", [True, False, None])
def test_a_source_tells_with_what_it_has_committed(decided: Optional[bool]) -> None:
    """Once. A script that goes on without a vote does not let its targets wait."""
    transport = MagicMock(gives_parts=True)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
    heals = heals_of([optimizer], transport)
    assert heals.offer(plan_of_source(1), whole=lambda: None)
    optimizer.param_groups[0]["lr"] = 0.25
    if decided is not None:
        heals.decided(decided)
    heals.decided(False)  # the next step begins
    ((step, quorum_id, decision),) = [call.args for call in transport.note_decision.call_args_list]
    assert (step, quorum_id) == (1, 3)
    assert decision[0][0]["lr"] == 0.25 if decided else decision is None


def test_a_hyperparameter_that_cannot_be_sent() -> None:
    """The targets learn of it before they have received anything."""
    transport = MagicMock(gives_parts=True)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)
    heals = heals_of([optimizer], transport)
    optimizer.param_groups[0]["lr"] = object()
    assert not heals.offer(plan_of_source(1), whole=lambda: None)
    assert "'lr' of the optimizer is a object" in transport.refuse_parts.call_args.args[1]


def test_a_source_describes_its_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they change. The other groups train meanwhile: thousands of parameters take some milliseconds."""
    described = MagicMock(side_effect=Parameters)
    monkeypatch.setattr(in_passing, "Parameters", described)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    heals = heals_of([optimizer])
    for step in (1, 2):
        heals.follow(plan_of_source(step))
        assert heals.offer(plan_of_source(step), whole=lambda: None)
        assert described.call_count == 1
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert heals.offer(plan_of_source(3), whole=lambda: None)
    assert described.call_count == 2


@pytest.mark.parametrize("key", ["part.0.7.0.0", "part.3.2.0.0", "part.0.0.0.7", "rest.0.1.0.1"])
def test_a_part_that_does_not_exist_is_refused(key: str) -> None:
    parts = StepParts(Parameters([torch.optim.SGD(nn.Linear(2, 2).parameters())]), lambda: None)
    assert parts.part("part.1.3.0.6").memory.numel() == 8
    with pytest.raises(ValueError, match=r"there is no part of the elements|is no part of a state"):
        parts.part(key)


def test_the_first_reduction_ends_a_pass(fixture: Fixture) -> None:
    manager = fixture.manager(heal_along=True)
    manager.start_quorum()
    manager.wait_quorum()
    manager._healing = True
    manager._in_passing._target = target = MagicMock()
    manager.allreduce(torch.ones(2)).wait()
    target.reduces.assert_called_once()
