"""Optimizers that would apply averaged gradients without a commit are refused."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.optim import OptimizerWrapper

REFUSED = (
    r"SGD.step: this model's gradients were averaged in a step that is not committed, .*OptimizerWrapper"
)


@pytest.fixture(params=[DistributedDataParallel, PureDistributedDataParallel])
def wrap(request: Any) -> Any:
    return request.param


class Loop:
    """A model in DDP, and two optimizers of one of its parameters each."""

    def __init__(self, manager: Any, wrap: Callable[..., nn.Module]) -> None:
        self.manager = manager
        self.net = nn.Linear(2, 1)
        self.ddp = wrap(manager, self.net)
        self.weight, self.bias = (torch.optim.SGD([p], lr=0.1) for p in (self.net.weight, self.net.bias))

    def compute(self) -> None:
        self.ddp(torch.ones(1, 2)).sum().backward()

    def state(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def test_an_optimizer_beside_the_wrapper(fixture: Any, wrap: Any) -> None:
    """The wrapper begins each step, and the loop calls the optimizer inside, which asks for no vote."""
    loop = Loop(fixture.manager(), wrap)
    wrapper, before = OptimizerWrapper(loop.manager, loop.weight), loop.state()
    wrapper.zero_grad()
    loop.compute()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=REFUSED):
            wrapper.optim.step()
    assert all(map(torch.equal, loop.state(), before))
    wrapper.step()
    assert not torch.equal(loop.net.weight, before[0])


def test_a_parameter_that_no_wrapper_owns(fixture: Any, wrap: Any) -> None:
    """It is trained while steps are committed, and refused in the first one that is not."""
    loop = Loop(fixture.manager(), wrap)
    wrapper = OptimizerWrapper(loop.manager, loop.weight)
    for number in range(2):
        wrapper.zero_grad()
        loop.compute()
        wrapper.step()
        loop.bias.step()
        assert loop.manager.current_step() == number + 1
    before = loop.state()
    wrapper.zero_grad()
    loop.compute()
    loop.manager.report_error(ValueError("the loss is NaN"))
    wrapper.step()
    with pytest.raises(RuntimeError, match=REFUSED):
        loop.bias.step()
    assert all(map(torch.equal, loop.state(), before))


def test_a_loop_without_a_wrapper(fixture: Any, wrap: Any) -> None:
    """It may vote by itself, and must heed the decision."""
    loop = Loop(fixture.manager(), wrap)
    loop.manager.start_quorum()
    loop.compute()
    assert loop.manager.should_commit()
    loop.weight.step()
    loop.manager.start_quorum()
    loop.compute()
    with pytest.raises(RuntimeError, match=REFUSED):
        loop.weight.step()
    loop.manager.report_error(ValueError("the loss is NaN"))
    assert not loop.manager.should_commit()
    with pytest.raises(RuntimeError, match=REFUSED):
        loop.weight.step()


def test_a_step_that_nobody_began(fixture: Any, wrap: Any) -> None:
    """The optimizer that zeroes the gradients is not the one that votes. After a decision the
    error is that of a first step.
    """
    loop = Loop(fixture.manager(), wrap)
    wrapper = OptimizerWrapper(loop.manager, loop.weight)
    wrapper.zero_grad()
    loop.compute()
    wrapper.step()
    wrapper.optim.zero_grad()
    with pytest.raises(RuntimeError, match=r"backward: no step has begun, .* must be called before it"):
        loop.compute()
    assert loop.manager.current_step() == 1


def test_what_is_allowed(fixture: Any, wrap: Any) -> None:
    loop = Loop(fixture.manager(), wrap)
    wrapper = OptimizerWrapper(loop.manager, loop.weight)
    other = nn.Linear(2, 1)
    elsewhere = torch.optim.SGD(other.parameters(), lr=0.1)
    wrapper.zero_grad()
    loop.compute()
    other(torch.ones(1, 2)).sum().backward()
    elsewhere.step()  # of a model that the groups do not share
    get_optimizer_state_dict(loop.net, wrapper)  # steps with a learning rate of 0
    wrapper.step()
    wrapper.zero_grad()
    with loop.ddp.no_sync():  # type: ignore[operator]
        loop.compute()
    loop.weight.step()  # nothing was averaged in this step
    made = copy.deepcopy(loop.ddp)
    assert not made._awaits_commit()  # type: ignore[operator]
