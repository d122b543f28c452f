from __future__ import annotations

from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import nn

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


def test_is_the_wrapped_optimizer_otherwise(manager: MagicMock) -> None:
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


def test_learning_rate_scheduler(manager: MagicMock) -> None:
    manager.should_commit.return_value = True
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.zero_grad()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
