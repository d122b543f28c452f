"""The model and data of test_loader.py, and the same training in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from torchft.data.exact_sum import ExactSum
from torchft.data.position import DataPlan, DataPosition

SETTINGS: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, seed=3, epochs=3)


def plan(samples: int) -> DataPlan:
    return DataPlan(samples, **SETTINGS)


def dataset(samples: int) -> TensorDataset:
    x = torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return nn.functional.mse_loss(output, y.to(output.dtype))


class InBfloat16(nn.Module):
    """Computes with a model's parameters in bfloat16, as MixedPrecisionPolicy does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cast = {name: parameter.bfloat16() for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, cast, (x.bfloat16(),))


def one_process(samples: int, reproducible: bool, bf16: bool = False) -> dict[str, torch.Tensor]:
    """Returns the weights after training on whole batches, or with exact sums over their units."""
    steps, data, model = plan(samples), dataset(samples), make_model(0)
    sgd = make_optimizer(model)
    forward = InBfloat16(model) if bf16 else model
    total = ExactSum(model.named_parameters(), steps.num_units(DataPosition()))
    position = DataPosition()
    while position != steps.end:
        units = steps.share(position, 0, 1).units
        if reproducible:
            complete = False
            while not complete:
                total.begin()
                for unit in units:
                    (loss_of(forward, *data[list(unit.indices)]) * unit.weight).backward()
                    total.add()
                complete = total.read()
            total.commit()
        else:
            sgd.zero_grad()
            loss_of(forward, *data[[index for unit in units for index in unit.indices]]).backward()
        sgd.step()
        position = steps.advance(position)
    return {name: p.detach() for name, p in model.named_parameters()}
