"""torch.distributed.checkpoint with torchft: a job is saved by one of its groups, and all groups resume from
that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from tests.integration.cluster import Cluster, Rank, results
from torchft import Optimizer
from torchft.manager import Manager

pytestmark = [
    # Each group is one process here.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.7's own writer
]


class Training(Stateful):
    """A group's model and optimizer, written like PyTorch's tutorial of torch.distributed.checkpoint."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.model = nn.Linear(3, 1)
        for p in self.model.parameters():
            nn.init.constant_(p, group + 0.5)  # groups differ until a heal or a checkpoint
        self.adam = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.adam)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.adam,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )

    def step(self, manager: Manager, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        seed = 2 * manager.current_step() + self.group
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        self.model(x).square().mean().backward()
        for p in self.model.parameters():
            assert p.grad is not None
            manager.allreduce(p.grad).wait()
        optimizer.step()

    def weights(self) -> list[float]:
        return [value for p in self.model.parameters() for value in p.flatten().tolist()]


def run(folder: Path, start: int, steps: int) -> list[list[float]]:
    """Returns the weights of two groups that train up to a step, from the saved state if `start` is not 0."""

    def train(rank: Rank) -> list[float]:
        training = Training(rank.group)
        manager = rank.start_manager(
            load_state_dict=training.load_state_dict, state_dict=training.state_dict, use_async_quorum=False
        )
        if start:
            dcp.load({"training": training, "manager": manager}, checkpoint_id=folder)
            assert (manager.current_step(), manager.batches_committed()) == (start, 2 * start)
        optimizer = Optimizer(manager, training.adam)
        rank.cluster.wait_for_healthy(2)
        while manager.current_step() < steps:
            training.step(manager, optimizer)
        if manager.participating_rank() == 0:
            dcp.save({"training": training, "manager": manager}, checkpoint_id=folder)
        return training.weights()

    with Cluster(min_replicas=2) as cluster:
        return results(*(cluster.start(train, group=group) for group in range(2)))


def test_a_job_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    """It resumes at the same step, and ends with the weights and moments of a job that was never
    interrupted.
    """
    halfway = run(tmp_path / "stopped", 0, 5)
    assert halfway[0] == halfway[1]
    went_on = run(tmp_path / "stopped", 5, 10)
    assert went_on[0] == went_on[1] != halfway[0]
    never_stopped = run(tmp_path / "whole", 0, 10)
    assert went_on == never_stopped
