"""The model of the replay tests, and the same training in one plain loop."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 200
BUCKET_MB = 0.1  # each layer has 160 kB


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model with the same weights in every group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(model: nn.Module, step: int, group: int) -> torch.Tensor:
    """Returns the loss of the group's batch of this step."""
    generator = torch.Generator().manual_seed(1000 * step + group)
    return model(torch.randn(4, WIDTH, generator=generator)).square().mean()


def reference(participants: list[list[int]]) -> dict[str, torch.Tensor]:
    """Returns the weights after one plain loop over the batches of the participants of each step."""
    model, optimizer = new_model()
    for step, groups in enumerate(participants):
        optimizer.zero_grad()
        for group in groups:
            (loss(model, step, group) / len(groups)).backward()
        optimizer.step()
    return model.state_dict()
