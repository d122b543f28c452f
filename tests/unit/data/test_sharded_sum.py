"""The integers of FSDP2's gradients: sums of shards, one rank of FSDP2, and what is refused.
tests/process/test_loader.py has groups of two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchft.data import exact_sum
from torchft.data._sharded_sum import ShardedGradients
from torchft.data.exact_sum import ExactSum

RANKS = 2
SHAPES = {"even": (4, 3), "uneven": (5, 2), "one": (1,)}


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shards_of(rank: int) -> dict[str, nn.Parameter]:
    """The parameters as a rank of RANKS has them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    made = {}
    for name, shape in SHAPES.items():
        whole = torch.zeros(shape)
        chunks = whole.chunk(RANKS)
        local = chunks[rank] if rank < len(chunks) else whole[:0]
        made[name] = nn.Parameter(
            DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride())
        )
    return made


def packed(unit: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradients of a unit as FSDP2 packs them: a row for each rank."""
    rows = []
    for gradient in unit.values():
        size = -(-len(gradient) // RANKS)
        padded = gradient.new_zeros((size * RANKS, *gradient.shape[1:]))
        padded[: len(gradient)] = gradient
        rows.append(padded.view(RANKS, -1))
    return torch.cat(rows, 1)


@pytest.mark.parametrize("scattered", [2**24, 2, 8, 10])
def test_shards_of_two_ranks_have_the_bits_of_the_whole_parameters(
    monkeypatch: pytest.MonkeyPatch, scattered: int
) -> None:
    monkeypatch.setattr(exact_sum, "_SCATTERED", scattered)
    units = [
        {name: torch.randn(shape) * 10.0**number for name, shape in SHAPES.items()} for number in range(RANKS)
    ]
    whole = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    total, complete = ExactSum(whole.items(), 8), False
    while not complete:
        total.begin()
        for unit in units:
            for name, gradient in unit.items():
                whole[name].grad = gradient.clone()
            total.add()
        complete = total.read()

    total.commit()
    # The ranks take turns in this process: what one adds is known to the next one from the turn before.
    blocks: list[list[torch.Tensor]] = [[], []]
    heads: list[torch.Tensor] = [torch.zeros(0)] * RANKS
    for turn in range(2):
        for rank in range(RANKS):
            shards = shards_of(rank)
            sharded = ExactSum(shards.items(), 8, RANKS)
            sharded.load_state_dict(total.state_dict())
            sharded.begin()

            known, blocks[rank] = iter(blocks[1 - rank]), []

            def scatter(
                mine: torch.Tensor, rank: int = rank, known: Iterator[torch.Tensor] = known
            ) -> torch.Tensor:
                blocks[rank].append(mine)
                return (mine + next(known, 0))[rank]

            sharded.add_sharded(list(shards.values()), packed(units[rank]), scatter)
            sharded.add()
            (head,) = sharded.in_group
            heads[rank] = head.clone()
            if not turn:
                continue
            head.copy_(sum(heads))
            assert sharded.read()
            for name, parameter in shards.items():
                grad: Any = parameter.grad
                chunks = whole[name].grad.chunk(RANKS)  # type: ignore[union-attr]
                expected = chunks[rank] if rank < len(chunks) else chunks[0][:0]
                assert torch.equal(grad.to_local(), expected), name


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


needs_fsdp = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="PyTorch 2.8 and older is refused"
)


@needs_fsdp
def test_a_single_rank_of_fsdp_has_the_bits_of_the_plain_model() -> None:
    plain, sharded = make(), make()
    for module in (sharded[0], sharded):
        fully_shard(module)
    gradients = []
    for model in (plain, sharded):
        fsdp = ShardedGradients((model,), ranks=1)
        total, complete = ExactSum(model.named_parameters(), 2), False
        while not complete:
            total.begin()
            for unit in (torch.ones(2, 3), torch.full((2, 3), 0.7)):
                fsdp.begin_unit(total, counted=True)
                model(unit).sum().backward()
                fsdp.end_unit()
                total.add()
            complete = total.read()
        gradients.append(
            [p.grad.to_local() if isinstance(p, DTensor) else p.grad for p in model.parameters()]
        )
    for a, b in zip(*gradients):
        assert torch.equal(a, b)


@needs_fsdp
def test_a_unit_that_does_not_count_adds_nothing() -> None:
    model = make()
    fully_shard(model)
    fsdp, total = ShardedGradients((model,), ranks=1), ExactSum(model.named_parameters(), 2)
    total.begin()
    fsdp.begin_unit(total, counted=False)
    model(torch.ones(2, 3)).sum().backward()
    fsdp.end_unit()
    total.add(counted=False)
    assert not any(buffer.any() for buffer in total.buffers)


# What is refused


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@needs_fsdp
def test_a_parameter_without_a_gradient_is_an_error() -> None:
    model = Partly()
    fully_shard(model)
    fsdp, total = ShardedGradients((model,), ranks=1), ExactSum(model.named_parameters(), 2)
    total.begin()
    fsdp.begin_unit(total, counted=True)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ValueError, match="not all parameters of an FSDP2 module have a gradient"):
        fsdp.end_unit()


@needs_fsdp
def test_a_second_backward_pass_in_a_unit_is_an_error() -> None:
    model = make()
    fully_shard(model)
    fsdp, total = ShardedGradients((model,), ranks=1), ExactSum(model.named_parameters(), 2)
    total.begin()
    fsdp.begin_unit(total, counted=True)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="allowed is one backward pass a unit"):
        fsdp.end_unit()


def test_an_older_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter", raising=False)
    model = make()
    fully_shard(model)
    with pytest.raises(ValueError, match=r"FSDP2 of PyTorch .* has no set_custom_reduce_scatter"):
        ShardedGradients((model,), ranks=1)


def with_a_parallel_weight() -> nn.Sequential:
    model = make()
    mesh = init_device_mesh("cpu", (1,))
    for name in ("weight", "bias"):
        value = getattr(model[1], name)
        setattr(model[1], name, nn.Parameter(distribute_tensor(value.data, mesh, [Shard(0)])))
    return model


def test_tensor_parallelism_is_refused_by_the_name_of_a_parameter() -> None:
    with pytest.raises(ValueError, match=r"parameter 1.weight is placed as .* no tensor parallelism"):
        ShardedGradients((with_a_parallel_weight(),), ranks=1)


@needs_fsdp
def test_a_dtensor_that_fsdp_does_not_reduce_is_an_error() -> None:
    model = with_a_parallel_weight()
    fully_shard(model[0])
    fsdp, total = ShardedGradients((model,), ranks=1), ExactSum(model.named_parameters(), 2)
    total.begin()
    fsdp.begin_unit(total, counted=True)
    for parameter in model[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    fsdp.end_unit()
    with pytest.raises(ValueError, match=r"parameter 1.weight is a DTensor that FSDP2 does not reduce"):
        total.add()
