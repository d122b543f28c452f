from __future__ import annotations

import copy
import pickle
from typing import Any, Callable
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torchft.dlrover.optimizer import DistributedOptimizer
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupDummy


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
    # PyTorch's checkpoint helpers call step(), which must not vote.
    manager.should_commit.return_value = False
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


class ScheduleFree(torch.optim.SGD):
    """Like optimizers without a schedule: training and evaluation have different weights."""

    training = True

    def eval(self) -> None:
        self._multiply(0.5)

    def train(self) -> None:
        self._multiply(2.0)

    def _multiply(self, factor: float) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(factor)

    def step(self, closure: Any = None, scale: float = 1.0) -> float:  # type: ignore[override]
        super().step()
        return scale


def test_attributes_are_the_wrapped_optimizers(manager: MagicMock) -> None:
    model = nn.Linear(1, 1)
    inner = ScheduleFree(model.parameters(), lr=1.0)
    optimizer = OptimizerWrapper(manager, inner)
    before = model.weight.item()
    optimizer.eval()
    assert model.weight.item() == before / 2
    optimizer.train()
    assert model.weight.item() == before and optimizer.training
    optimizer.training = False
    assert not inner.training and "training" not in vars(optimizer)
    optimizer.noise = 3  # an attribute that neither has
    assert inner.noise == 3 and optimizer.noise == 3
    del optimizer.noise
    assert not hasattr(inner, "noise")
    with pytest.raises(AttributeError, match="'ScheduleFree' object has no attribute 'noise'"):
        _ = optimizer.noise
    with pytest.raises(AttributeError, match="'ScheduleFree' object has no attribute 'noise'"):
        del optimizer.noise
    optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
    optimizer.defaults = {"lr": 0.5}
    optimizer.state = {}
    assert inner.param_groups[0]["lr"] == 0.5 and inner.defaults == {"lr": 0.5} and inner.state == {}
    assert optimizer.manager is manager and not hasattr(inner, "manager")


@pytest.mark.parametrize("committed", [True, False])
def test_arguments_and_result_of_step(manager: MagicMock, committed: bool) -> None:
    optimizer = OptimizerWrapper(manager, ScheduleFree(nn.Linear(1, 1).parameters()))
    manager.should_commit.return_value = committed
    assert optimizer.step(scale=4.0) == (4.0 if committed else None)


def distributed(manager: Any, inner: torch.optim.Optimizer) -> DistributedOptimizer:
    return DistributedOptimizer(inner, manager=manager)


Wrap = Callable[[Any, torch.optim.Optimizer], torch.optim.Optimizer]
WRAPPERS = pytest.mark.parametrize("wrap", [OptimizerWrapper, distributed])


@pytest.fixture
def uncopyable(manager: MagicMock) -> MagicMock:
    manager.num_participants.return_value = 1
    manager.should_commit.return_value = True
    manager.__deepcopy__ = manager.__copy__ = manager.__reduce_ex__ = MagicMock(
        side_effect=AssertionError("copied")
    )
    return manager


def trained(wrap: Wrap, manager: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    optimizer = wrap(manager, torch.optim.Adam(model.parameters(), lr=0.5))
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()


@WRAPPERS
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_copy_with_its_model_steps_the_copied_model(
    uncopyable: MagicMock, wrap: Wrap, scheduled: bool
) -> None:
    model, optimizer = trained(wrap, uncopyable)
    if scheduled:  # it replaces the method of the instance
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    twin, other = copy.deepcopy((model, optimizer))
    before = model.weight.detach().clone()
    votes = uncopyable.should_commit.call_count
    train(twin, other)
    assert type(other) is type(optimizer) and uncopyable.should_commit.call_count == votes + 1
    assert torch.equal(model.weight, before) and not torch.equal(twin.weight, before)
    train(model, optimizer)
    assert torch.equal(model.weight, twin.weight)


@WRAPPERS
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_has_its_own_groups(uncopyable: MagicMock, wrap: Wrap, how: Callable[[Any], Any]) -> None:
    """As for the plots of a schedule."""
    _, optimizer = trained(wrap, uncopyable)
    other = how(optimizer)
    assert other.optim is not optimizer.optim
    scheduler = torch.optim.lr_scheduler.StepLR(other, step_size=1, gamma=0.5)
    other.step()
    scheduler.step()
    shared = how is copy.copy  # as PyTorch's own
    assert other.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["lr"] == (0.25 if shared else 0.5)


@WRAPPERS
def test_a_pickle_holds_no_manager(uncopyable: MagicMock, wrap: Wrap) -> None:
    model, optimizer = trained(wrap, uncopyable)
    twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    assert torch.equal(twin.weight, model.weight) and other.param_groups[0]["params"][0] is twin.weight
    assert other.state_dict()["state"][0]["step"] == 1
    kind = type(optimizer).__name__
    for call in (other.zero_grad, other.step, copy.deepcopy(other).step):
        with pytest.raises(
            RuntimeError, match=f"this {kind} was unpickled.* no Manager.*wrap its attribute `optim`"
        ):
            call()
    anew = wrap(uncopyable, other.optim)
    for one in ((twin, anew), (model, optimizer)):
        train(*one)
    assert torch.equal(twin.weight, model.weight)


def test_setstate_is_the_wrapped_optimizers(manager: MagicMock) -> None:
    """PyTorch's own would patch the class, and with it the step of all wrappers."""
    step = OptimizerWrapper.step
    _, optimizer = trained(OptimizerWrapper, manager)
    state = optimizer.__getstate__()
    assert state.keys() == {"defaults", "state", "param_groups"}
    optimizer.__setstate__(state)
    assert OptimizerWrapper.step is step


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_scaler_sees_one_optimizer(manager: MagicMock, inner_first: bool) -> None:
    model = nn.Linear(1, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = OptimizerWrapper(manager, inner)
    outer = OptimizerWrapper(manager, optimizer)
    scaler = GradScaler("cpu", init_scale=4.0)
    for _ in range(2):
        before = model.weight.item()
        model.zero_grad()
        scaler.scale(model(torch.full((1,), 3.0)).sum()).backward()
        scaler.unscale_(inner if inner_first else outer)
        for one in (inner, optimizer, outer):
            with pytest.raises(RuntimeError, match="already been called"):
                scaler.unscale_(one)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(inner)
        scaler.update()
        assert model.weight.item() == pytest.approx(before - 3.0)
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("inner", [True, False])
def test_a_sharded_scaler_sees_one_optimizer(manager: MagicMock, inner: bool) -> None:
    """Its `unscale_` is its own."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=ProcessGroupDummy(0, 1))
    before = model.weight.item()
    for _ in range(2):
        model.zero_grad()
        scaler.scale(model(torch.full((1,), 3.0)).sum()).backward()
        scaler.unscale_(optimizer.optim if inner else optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert model.weight.item() == pytest.approx(before - 6.0)


def test_a_scaler_skips_a_step_with_infinite_gradients(manager: MagicMock) -> None:
    model = nn.Linear(1, 1)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.full((1,), float("inf"))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    manager.should_commit.assert_not_called()
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_not_committed_does_not_change_the_scale(manager: MagicMock, fused: bool) -> None:
    """Otherwise the gradients that groups keep of it would have another scale than the new ones."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1.0, fused=fused))
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2)
    scales = []
    for committed in (False, True, False, False, True, True):
        manager.should_commit.return_value = committed
        model.zero_grad()
        scaler.scale(model(torch.full((1,), 3.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    manager.should_commit.return_value = False
    scaler.scale(model(torch.ones(1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update(2.0)
    assert scaler.get_scale() == 2.0


def test_a_scaler_that_is_off_steps(manager: MagicMock) -> None:
    _, optimizer = trained(OptimizerWrapper, manager)
    GradScaler("cpu", enabled=False).step(optimizer)
    assert manager.should_commit.call_count == 2


def test_a_fused_optimizer_unscales_by_itself(manager: MagicMock) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1.0, fused=True))
    scaler = GradScaler("cpu", init_scale=4.0)
    before = model.weight.item()
    scaler.scale(model(torch.full((1,), 3.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.item() == pytest.approx(before - 3.0)
    manager.should_commit.assert_called_once_with()


def test_cycles_and_averages(manager: MagicMock) -> None:
    """Schedulers and helpers of PyTorch that take an optimizer."""
    manager.should_commit.return_value = True
    model = nn.Linear(1, 1)
    optimizer = OptimizerWrapper(manager, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=5)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    late = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.25, anneal_epochs=1)
    for _ in range(3):
        train_linear(model, optimizer)
        scheduler.step()
        averaged.update_parameters(model)
    for _ in range(2):
        train_linear(model, optimizer)
        late.step()
    assert optimizer.param_groups[0]["lr"] == 0.25


def train_linear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1)).sum().backward()
    optimizer.step()
