"""A rank of FSDP2 that compares exact sums of its shards with those of the whole model, for several ways of
sharding.
"""

from __future__ import annotations

import os
from typing import Any, Optional

import torch
import torch.distributed as dist
from events import emit
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from torchft.data import exact_sum
from torchft.data._sharded_sum import ShardedGradients
from torchft.data.exact_sum import ExactSum

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TOKENS, UNITS = 11, 6


class Net(nn.Module):
    """Has parameters that are frozen, or that the ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, 8), nn.LayerNorm(6)
        self.inner, self.head = nn.Linear(8, 6), nn.Linear(6, TOKENS, bias=False)
        self.inner.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.norm(torch.tanh(self.inner(self.embed(x)))))
        return output


def make(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def sums(model: nn.Module, units: list[torch.Tensor], ranks: int) -> dict[str, Optional[torch.Tensor]]:
    """The gradients of all units, of which this rank computes some."""
    fsdp, total = ShardedGradients((model,), ranks), ExactSum(model.named_parameters(), UNITS, ranks)
    complete = False
    while not complete:
        total.begin()
        for unit in units:
            fsdp.begin_unit(total, counted=True)
            output = model(unit).float().flatten(0, 1)
            nn.functional.cross_entropy(output, unit.roll(1, 1).flatten()).backward()
            fsdp.end_unit()
            total.add()
        for buffer in total.in_group if ranks > 1 else []:
            dist.all_reduce(buffer)
        complete = total.read()
    return {name: _whole(parameter.grad) for name, parameter in model.named_parameters()}


def _whole(gradient: Any) -> Optional[torch.Tensor]:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


torch.set_num_threads(1)
dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(0)
batch = [torch.randint(0, TOKENS, (4, 5), generator=generator) for _ in range(UNITS)]
by_columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] % RANKS == 0 else None}
ways: list[tuple[torch.dtype, dict[str, Any], int]] = [
    (torch.float32, {}, exact_sum._SCATTERED),
    (torch.float32, by_columns, exact_sum._SCATTERED),
    (torch.bfloat16, {}, 64),  # several blocks of a parameter, and parameters of a block
]
for number, (dtype, options, scattered) in enumerate(ways):
    exact_sum._SCATTERED = scattered
    whole, sharded = make(dtype), make(dtype)
    for part in (sharded.embed, sharded.inner, sharded):
        fully_shard(part, **options)
    expected, got = sums(whole, batch, 1), sums(sharded, batch[RANK::RANKS], RANKS)
    for name, gradient in expected.items():
        other = got[name]
        alike = other is None if gradient is None else other is not None and torch.equal(gradient, other)
        emit("compared", way=number, name=name, alike=alike, none=gradient is None)
dist.destroy_process_group()
