"""The hyperparameters that travel with a heal."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

from torchft._manager.heal import hyperparameters
from torchft.optim import OptimizerWrapper


def parameter() -> torch.Tensor:
    return torch.zeros(2, requires_grad=True)


def test_the_target_has_those_of_the_source() -> None:
    source = Adam(
        [{"params": [parameter()], "lr": 0.5}, {"params": [parameter()], "betas": (0.1, 0.2)}], amsgrad=True
    )
    target = Adam([{"params": [parameter()]}, {"params": [parameter()]}])
    own = target.param_groups[0]["params"]
    hyperparameters.write([target], hyperparameters.read([source]))
    for here, there in zip(target.param_groups, source.param_groups):
        assert {**here, "params": ()} == {**there, "params": ()}
    assert target.param_groups[0]["params"] is own


def test_a_tensor_of_the_target_stays() -> None:
    """A CUDA graph may have captured it."""
    source, target = (Adam([parameter()], lr=torch.tensor(lr), foreach=False) for lr in (0.5, 0.1))
    own = target.param_groups[0]["lr"]
    hyperparameters.write([target], hyperparameters.read([source]))
    assert target.param_groups[0]["lr"] is own and own == 0.5
    hyperparameters.write([target], [[{"lr": 0.25}]])
    assert own == 0.25


def test_what_belongs_to_a_script_does_not_travel() -> None:
    optimizer = SGD([parameter()], lr=0.1)
    optimizer.param_groups[0].update(hook=print, nested={"a": 1}, names=["w", "b"])
    ((group,),) = hyperparameters.read([optimizer])
    assert group["names"] == ["w", "b"]
    assert not {"params", "hook", "nested"} & group.keys()


class Container(Optimizer):
    """As torchtitan's: an optimizer that steps others."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__(
            [p for one in optimizers for group in one.param_groups for p in group["params"]], {"lr": 1.0}
        )
        self.outside = OptimizerWrapper(MagicMock(), self)


def test_an_optimizer_that_holds_others() -> None:
    source, target = (
        Container(SGD([parameter()], lr=lr), Adam([parameter()], lr=2 * lr)) for lr in (0.1, 0.2)
    )
    hyperparameters.write([target], hyperparameters.read([source]))
    assert [one.param_groups[0]["lr"] for one in target.optimizers] == [0.1, 0.2]
    assert len(hyperparameters.read([source])) == 3


def test_what_a_script_has_changed() -> None:
    one = SGD([parameter()], lr=0.5)
    one.param_groups[0]["pair"] = (0.1, torch.ones(2))
    before = hyperparameters.read([one])
    one.param_groups[0].update(lr=0.25, pair=(0.1, torch.zeros(2)), new=1)
    assert hyperparameters.changed(before, hyperparameters.read([one])) == [[{"lr": 0.25}]]


def test_other_parameter_groups() -> None:
    one, two = SGD([parameter()], lr=0.1), SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.2)
    with pytest.raises(
        ValueError, match=r"the optimizers here have \[1\] parameter groups, those of the source \[2\]"
    ):
        hyperparameters.write([one], hyperparameters.read([two]))
    assert one.param_groups[0]["lr"] == 0.1
