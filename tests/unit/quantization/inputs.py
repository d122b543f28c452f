"""Inputs for quantization: ordinary values, and edge cases."""

from __future__ import annotations

import torch

INF, NAN = float("inf"), float("nan")


def flat_inputs() -> dict[str, torch.Tensor]:
    """Returns flat float32 tensors by name, the same at each call."""
    random = torch.Generator().manual_seed(0)

    def normal(n: int) -> torch.Tensor:
        return torch.randn(n, generator=random)

    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), generator=random).int()
    huge = torch.tensor([3.4028e38, -3.4028e38, 3.3e38, 1.0])
    return {
        "empty": torch.empty(0),
        "one": torch.tensor([1 / 3]),
        "zeros": torch.zeros(5000),
        "negative zeros": -torch.zeros(10),
        "a block": normal(2048),
        "a block and one": normal(2049),
        "odd": normal(4999),
        "wide": normal(5000) * torch.logspace(-38, 38, 5000),
        "one outlier": torch.cat([normal(3000) * 1e-6, torch.tensor([1e6])]),
        "subnormal": torch.full((3000,), 1e-42),
        "near the smallest scale": normal(3000) * 2.0**-100,
        "the largest": huge,
        "powers of two": 2.0 ** torch.arange(-149, 128).float(),
        "limits of the scale": torch.tensor(
            [448.0, 1.75, 127.0, 1.984375, 449.0, 1.7500001, 128.0]
        ).repeat_interleave(2048),
        "NaN and Inf": torch.tensor([1.0, NAN, -2.0, INF, -INF, 0.0, 3.0]),
        "only NaN": torch.full((2100,), NAN),
        "any bits": bits.view(torch.float32),
    }
