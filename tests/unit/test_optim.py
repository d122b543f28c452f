from __future__ import annotations

from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from torchft.manager import Manager
from torchft.optim import OptimizerWrapper


@pytest.fixture
def manager() -> MagicMock:
    return create_autospec(Manager, instance=True)


def test_zero_grad_starts_the_quorum(manager: MagicMock) -> None:
    model = nn.Linear(2, 2)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(2)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    manager.start_quorum.assert_called_once_with()
    assert model.weight.grad is not None and model.weight.grad.abs().sum() == 0
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize("committed", [True, False])
def test_steps_only_when_committed(manager: MagicMock, committed: bool) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1.0))
    manager.should_commit.return_value = committed
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before) is not committed


def test_closure_is_refused(manager: MagicMock) -> None:
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    with pytest.raises(AssertionError, match="closure"):
        optimizer.step(closure=lambda: 1.0)
    manager.should_commit.assert_not_called()


def test_other_methods_are_the_wrapped_optimizers(manager: MagicMock) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.Adam(model.parameters(), lr=1.0)
    optimizer = OptimizerWrapper(manager, inner)
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults and "Adam" in repr(optimizer)
    extra = nn.Parameter(torch.ones(1))
    optimizer.add_param_group({"params": [extra]})
    assert len(inner.param_groups) == 2
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)
    assert inner.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("committed", [True, False])
def test_hooks_are_the_wrapped_optimizers(manager: MagicMock, committed: bool) -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.Adam(model.parameters())
    optimizer = OptimizerWrapper(manager, inner)
    manager.should_commit.return_value = committed
    called: list[str] = []
    of_state = ["state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"]
    handles = []
    for kind in ["step_pre", "step_post", *of_state]:

        def hook(hooked: torch.optim.Optimizer, *args: object, kind: str = kind) -> None:
            assert hooked is inner
            called.append(kind)

        handles.append(getattr(optimizer, f"register_{kind}_hook")(hook))
    optimizer.zero_grad()
    optimizer.step()
    assert called == (["step_pre", "step_post"] if committed else [])
    called.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == of_state
    called.clear()
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.state_dict()
    assert called == []


@pytest.mark.parametrize("scheduled", [False, True])
def test_checkpoint_helpers_neither_vote_nor_start_a_quorum(manager: MagicMock, scheduled: bool) -> None:
    manager.should_commit.return_value = False  # PyTorch's checkpoint helpers call step(), which must not vote
    model, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    before = model.weight.detach().clone()
    optimizer = OptimizerWrapper(manager, torch.optim.Adam(model.parameters(), lr=0.5))
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    state = get_optimizer_state_dict(model, optimizer)
    assert state["state"]["weight"]["exp_avg"].shape == (2, 2)
    other = OptimizerWrapper(manager, torch.optim.Adam(twin.parameters(), lr=0.25))
    set_optimizer_state_dict(twin, other, state)
    assert other.param_groups[0]["lr"] == 0.5 and torch.equal(model.weight, before)
    manager.start_quorum.assert_not_called()
    manager.should_commit.assert_not_called()
    optimizer.zero_grad()
    optimizer.step()
    manager.start_quorum.assert_called_once_with()
    manager.should_commit.assert_called_once_with()


def test_learning_rate_scheduler(manager: MagicMock) -> None:
    manager.should_commit.return_value = True
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.zero_grad()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
