"""Gradients on a device, whose work is late, are compared like those on the CPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import torchft
from tests.integration.cluster import DEADLINE, Cluster, Rank, results
from tests.late import load
from tests.late.test_jobs import on_device
from torchft._manager.checks.audits import CorruptedGradient

load()
from tests.late.group import ProcessGroupLate  # noqa: E402

STEPS = 6


@pytest.mark.parametrize(("deterministic", "factor"), [(True, 1 + 2**-22), (False, 1.1)])
def test_a_wrong_gradient_on_a_device_is_found(
    late: ModuleType, deterministic: bool, factor: float, request: pytest.FixtureRequest
) -> None:
    """By its bits, or by the bound."""
    late.delays(7, 0, 500)

    def loop(rank: Rank) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 1)).to(on_device(rank))
        manager = rank.start_manager(
            audit=0.5,
            load_state_dict=net.load_state_dict,
            state_dict=net.state_dict,
        )
        model = torchft.DistributedDataParallel(manager, net)
        optimizer = torchft.Optimizer(manager, torch.optim.SGD(net.parameters(), lr=0.05))
        x = torch.randn(12 * STEPS, 3, generator=torch.Generator().manual_seed(1))
        loader = torchft.data.ElasticDataLoader(
            manager, TensorDataset(x), global_batch_size=12, micro_batch_size=2, reproducible_rng=True
        )
        if rank.group == 1:
            net[0].weight.register_hook(lambda gradient: gradient * factor)
        rank.cluster.wait_for_healthy(3)
        for step in loader:
            optimizer.zero_grad()
            for unit in step:
                with unit.accumulate(model):
                    y = model(unit.data[0].to(on_device(rank)))
                    (y.square().mean() * unit.weight).backward()
            try:
                optimizer.step()
            except CorruptedGradient as e:
                rank.crash()
                return e
        return manager.current_step()

    torch.use_deterministic_algorithms(deterministic)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    with Cluster(min_replicas=1, make_pg=lambda group: ProcessGroupLate(timeout=DEADLINE)) as cluster:
        first, wrong, last = results(*(cluster.start(loop, group) for group in range(3)))
    assert first == last == STEPS
    assert isinstance(wrong, CorruptedGradient) and "group_1" in str(wrong)
