"""What the jobs of test_loader.py train, and what one process makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from torchft.data.position import Plan, Position

SAMPLES = 41  # no multiple of anything
SETTINGS: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, seed=3, epochs=3)


def dataset() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def one_process() -> tuple[dict[str, list[float]], list[list[int]]]:
    """The weights, and the samples of each step."""
    plan, data, model, batches = Plan(SAMPLES, **SETTINGS), dataset(), make_model(0), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    position = Position()
    while position != plan.end:
        batches.append(sorted(index for unit in plan.share(position, 0, 1).units for index in unit.indices))
        sgd.zero_grad()
        loss_of(model, *(tensor[batches[-1]] for tensor in data.tensors)).backward()
        sgd.step()
        position = plan.advance(position)
    return {name: p.flatten().tolist() for name, p in model.named_parameters()}, batches
