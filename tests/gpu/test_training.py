"""Two replica groups on one device train with DDP and Adam; one fails and heals from the other's device
memory.

The groups are processes, or threads of one process. Each thread has its own stream: on the default stream,
the operations of both groups would be ordered, which would hide a missing wait.
"""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from hsdp_job import kill_and_heal
from torch import nn

import torchft.process_group
from tests.gpu.device import DEVICE
from tests.gpu.test_heal_memory import InUpstreamFormat
from tests.integration.cluster import DEADLINE, Cluster, Rank, results
from torchft.ddp import DistributedDataParallel
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroup, ProcessGroupGloo

WIDTH = 512
STEPS = 10
CRASH_AT = 4

KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "gloo": lambda: ProcessGroupGloo(timeout=DEADLINE),
    "isolated gloo": lambda: torchft.process_group.ProcessGroupBabyGloo(timeout=DEADLINE),
}


def batch(step: int, group: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + group)
    return torch.randn(8, WIDTH, generator=generator)


class Training:
    """The training loop of a group. The second group has other weights at each start, so that it must
    heal.
    """

    def __init__(self, transport: Callable[[], Any] = lambda: None, **settings: Any) -> None:
        self.transport, self.settings = transport, settings
        self.lives = 0
        self.healed: list[bool] = []

    def __call__(self, rank: Rank) -> dict[str, torch.Tensor]:
        torch.cuda.set_device(DEVICE)
        # Autograd has one thread per device. The two groups would deadlock: one occupies the thread in a
        # backward pass that waits for an allreduce, and the other one waits for the thread.
        with torch.cuda.stream(torch.cuda.Stream()), torch.autograd.set_multithreading_enabled(False):
            return self._train(rank)

    def _train(self, rank: Rank) -> dict[str, torch.Tensor]:
        life = 0
        if rank.group == 1:
            life, self.lives = self.lives, self.lives + 1
        torch.manual_seed(10 * rank.group + life)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), "adam": adam.state_dict()}

        def load(state: dict[str, Any]) -> None:
            received = [t for t in state["model"].values() if isinstance(t, torch.Tensor)]
            self.healed.append(all(t.device.type == DEVICE.type for t in received))
            model.load_state_dict(state["model"])
            adam.load_state_dict(state["adam"])

        manager = rank.start_manager(
            load_state_dict=load, state_dict=state, checkpoint_transport=self.transport(), **self.settings
        )
        ddp = DistributedDataParallel(manager, model)
        optimizer = OptimizerWrapper(manager, adam)
        rank.cluster.wait_for_healthy(2)
        while (step := manager.current_step()) < STEPS:
            if rank.group == 1 and life == 0 and step == CRASH_AT:
                rank.crash()
                return {}
            if rank.group == 0 and step == CRASH_AT + 2:
                rank.cluster.wait_for_healthy(2)
            optimizer.zero_grad()
            ddp(batch(step, rank.group).to(DEVICE, non_blocking=True)).square().mean().backward()
            optimizer.step()
        torch.cuda.current_stream().synchronize()
        weights = {f"weights {name}": t.cpu() for name, t in model.state_dict().items()}
        for i, moments in adam.state_dict()["state"].items():
            assert moments["exp_avg"].device.type == DEVICE.type
            weights.update({f"{name} of {i}": t.cpu() for name, t in moments.items()})
        return weights


def check(training: Training, make_pg: Callable[[], ProcessGroup]) -> None:
    """Checks that both groups end with the same bits, and that heals arrived on the device."""
    with Cluster(make_pg=lambda group: make_pg()) as cluster:
        survivor = cluster.start(training, 0)
        results(cluster.start(training, 1))
        ours, theirs = results(survivor, cluster.start(training, 1))
    assert len(training.healed) >= 2 and all(training.healed)
    assert ours.keys() == theirs.keys() and len(ours) > 8
    for name, mine in ours.items():
        assert torch.equal(mine, theirs[name]), name
        assert mine.isfinite().all(), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_group_crashes_and_heals(kind: str, use_async_quorum: bool) -> None:
    check(Training(use_async_quorum=use_async_quorum), KINDS[kind])


def test_a_heal_in_the_upstream_format() -> None:
    """The same format as with upstream groups, in chunks."""
    check(Training(lambda: InUpstreamFormat(DEADLINE, 3)), KINDS["gloo"])


@pytest.mark.usefixtures("fork_server")
@pytest.mark.parametrize("kind", ["ProcessGroupGloo", "ProcessGroupBabyGloo"])
def test_processes_one_of_which_is_killed(kind: str) -> None:
    """The weights equal those of a plain loop without torchft."""
    kill_and_heal(1, wrap="ddp", device="cuda", kind=kind)


@pytest.mark.usefixtures("fork_server")
@pytest.mark.nccl_ranks(2)
@pytest.mark.parametrize("kind", ["ProcessGroupNCCL", "ProcessGroupBabyNCCL"])
def test_nccl_between_processes_one_of_which_is_killed(kind: str) -> None:
    kill_and_heal(1, wrap="ddp", device="cuda", kind=kind)
