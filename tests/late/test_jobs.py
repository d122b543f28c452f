"""Jobs on the test device: a real lighthouse and real managers; the ranks are threads with a device each.

With any schedule, they end with the weights of the same job on the CPU, bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Work

from tests.integration.cluster import DEADLINE, Cluster, Rank, results
from tests.late import load
from torchft import DistributedDataParallel, Optimizer
from torchft.local_sgd import LocalSGD
from torchft.process_group import ProcessGroup, ProcessGroupGloo

late_device = load()
from tests.late.group import ProcessGroupLate  # noqa: E402

STEPS = 6
_SEEDING = threading.Lock()


def on_device(rank: Rank) -> torch.device:
    torch.accelerator.set_device_index(rank.group)
    return torch.device("late", rank.group)


def model_of(seed: int) -> nn.Sequential:
    with _SEEDING:  # all threads share one generator
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 3))


def batch(step: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + group)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


class Training:
    """The training loop of each rank. All begin with the same weights."""

    def __init__(
        self,
        device_of: Callable[[Rank], torch.device],
        ddp: bool = True,
        steps: int = STEPS,
        static: bool = False,
    ) -> None:
        self.device_of, self.ddp, self.steps, self.static = device_of, ddp, steps, static

    def __call__(self, rank: Rank) -> list[torch.Tensor]:
        device = self.device_of(rank)
        model = model_of(0).to(device)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        manager = rank.start_manager(init_sync=False)
        wrapped = DistributedDataParallel(manager, model, static_graph=self.static) if self.ddp else model
        optimizer = Optimizer(manager, adam)
        rank.cluster.wait_for_healthy(2)
        for _ in range(2 * self.steps):  # bounded, so that repeated failures of a step end the test
            if manager.current_step() == self.steps:
                break
            x, y = (t.to(device) for t in batch(manager.current_step(), rank.group))
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            if not self.ddp:
                for work in [manager.allreduce(p.grad) for p in model.parameters()]:
                    work.wait()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]


def run(
    training: Callable[[Rank], list[torch.Tensor]], make_pg: Callable[[int], ProcessGroup]
) -> list[list[torch.Tensor]]:
    with Cluster(make_pg=make_pg, min_replicas=2) as cluster:
        return results(cluster.start(training, 0), cluster.start(training, 1))


def late_pg(group: int) -> ProcessGroup:
    return ProcessGroupLate(timeout=DEADLINE)


@pytest.fixture(scope="module")
def on_cpu() -> list[torch.Tensor]:
    """The final weights of the job on the CPU."""
    first, second = run(
        Training(lambda rank: torch.device("cpu")), lambda group: ProcessGroupGloo(timeout=DEADLINE)
    )
    assert all(map(torch.equal, first, second))
    return first


@pytest.mark.parametrize("kind", ["ddp", "static graph", "allreduce"])
@pytest.mark.parametrize("schedule", ["at once", "delayed", "lazy"])
def test_the_weights_are_those_of_the_cpu(late, on_cpu, schedule: str, kind: str) -> None:
    if schedule == "delayed":
        late.delays(7, 0, 500)
    if schedule == "lazy":
        late.lazy(5000)
    for weights in run(Training(on_device, ddp=kind != "allreduce", static=kind == "static graph"), late_pg):
        assert all(map(torch.equal, weights, on_cpu))


class Averaging:
    """LocalSGD: each group trains on its own for two steps."""

    def __init__(self, device_of: Callable[[Rank], torch.device]) -> None:
        self.device_of = device_of

    def __call__(self, rank: Rank) -> list[torch.Tensor]:
        device = self.device_of(rank)
        model = model_of(0).to(device)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        manager = rank.start_manager(init_sync=False, use_async_quorum=False)
        rank.cluster.wait_for_healthy(2)
        with LocalSGD(manager, model, adam, sync_every=2):
            for step in range(STEPS):
                x, y = (t.to(device) for t in batch(step, rank.group))
                adam.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                adam.step()
        assert manager.current_step() == STEPS // 2
        return [p.detach().cpu() for p in model.parameters()]


class Hasty(dist._Work):
    """A work with a mistake: it takes "queued" for "finished", so its results are not ordered behind the
    operation.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(self._work.get_future().value())
        return done

    def is_completed(self) -> bool:
        return True


class ProcessGroupSlow(ProcessGroupLate):
    """A process group whose collectives take longer than the computations beside them."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        side = torch.Stream("late")
        side.wait_event(torch.accelerator.current_stream().record_event())
        with side:
            late_device.enqueue(partial(time.sleep, 0.1))
            return super().allreduce(tensors, opts)


class ProcessGroupHasty(ProcessGroupSlow):
    """A process group with that mistake. It is slow, so that every read comes before the result."""

    def _wrap_work(self, work: Work, opts: object) -> Work:
        return Hasty(work)


@pytest.mark.parametrize("ddp", [True, False], ids=["future", "wait"])
def test_a_group_that_takes_queued_work_for_finished_is_detected(late, on_cpu, ddp: bool) -> None:
    training = Training(on_device, ddp=ddp)
    ends = run(training, lambda group: ProcessGroupHasty(timeout=DEADLINE))
    assert not all(all(map(torch.equal, weights, on_cpu)) for weights in ends)


@pytest.mark.parametrize("hasty", [False, True])
def test_local_sgd_ends_with_the_weights_of_the_cpu(late, hasty: bool) -> None:
    """With the mistake of ProcessGroupHasty, it does not."""
    on_cpu = run(
        Averaging(lambda rank: torch.device("cpu")), lambda group: ProcessGroupGloo(timeout=DEADLINE)
    )
    if not hasty:  # delays beside the collectives would make the early reads late
        late.delays(7, 1000, 2000)
    kind = ProcessGroupHasty if hasty else ProcessGroupLate
    ends = run(Averaging(on_device), lambda group: kind(timeout=DEADLINE))
    assert all(all(map(torch.equal, *pair)) for pair in zip(ends, on_cpu)) is not hasty
