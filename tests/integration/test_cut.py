"""A slow group computes fewer units, and the weights are the bits of one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration.cluster import Cluster, results
from tests.integration.test_loader import SETTINGS, Training
from tests.integration.test_reproducible import check_bits
from torchft.manager import Manager

GROUPS, SLOW = 4, 2
# Seconds of a unit. The slow group's is so much longer that the noise of a busy host does not matter.
USUAL_UNIT, SLOW_UNIT = 0.002, 0.02


class Sleeps(nn.Module):
    def __init__(self, manager: Manager, model: nn.Module) -> None:
        super().__init__()
        self.manager, self.model = manager, model
        self.slow = manager._replica_id.startswith(f"group_{SLOW}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_UNIT if self.slow and self.manager.current_step() < 150 else USUAL_UNIT)
        output: torch.Tensor = self.model(x)
        return output


@pytest.mark.slow  # tests/unit/data/test_cut.py has the rule
def test_a_slow_group_computes_fewer_units_and_the_bits_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"micro_batch_size": 1, "epochs": 60}  # 240 steps, most of 12 units
    for name, value in sizes.items():
        monkeypatch.setitem(SETTINGS, name, value)
    training = Training(
        start_with=GROUPS, settings={"reproducible_reduction": True, "init_sync": False}, wrap=Sleeps
    )
    with Cluster(min_replicas=GROUPS) as cluster:
        ended = results(*(cluster.start(training, group) for group in range(GROUPS)))
    check_bits(training, ended)
    assert training.lost == []
    steps = range(1 + max(step for _, step in training.units))
    units = [[training.units[group, step][-1] for group in range(GROUPS)] for step in steps]
    assert units[0] == units[1] == [3, 3, 3, 3], "nothing is known yet"
    assert {tuple(of_step) for of_step in units if sum(of_step) == 12} - {(3, 3, 3, 3)}
    least = min(of_step[SLOW] for of_step in units if sum(of_step) == 12)
    assert least == 1
    assert max(max(of_step) for of_step in units) >= 4, "the others compute what it does not"
