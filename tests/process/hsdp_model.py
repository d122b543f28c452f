"""The model and the data of hsdp_worker.py, and the same training in one plain loop."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)  # not divisible by the number of shards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def batch(step: int, group: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * group + rank)
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, 5, generator=generator)


def reference(
    seed: int, participants: list[list[int]], shards: int, bf16: bool = False
) -> dict[str, list[float]]:
    """Returns the weights after training with the given groups in each step.

    With ``bf16`` each pass computes in bfloat16, and weights, gradients and Adam are float32.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    torch.manual_seed(seed)
    model = Model()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, groups in enumerate(participants):
        adam.zero_grad()
        for group in groups:
            for rank in range(shards):
                x, y = batch(step, group, rank)
                cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
                output = torch.func.functional_call(model, cast, (x.to(dtype),))
                (nn.functional.mse_loss(output, y.to(dtype)) / (len(groups) * shards)).backward()
        adam.step()
    return {name: p.flatten().tolist() for name, p in model.named_parameters()}
