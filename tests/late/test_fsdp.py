"""FSDP2 on the test device: alone, and over a mesh of two replica groups with two ranks each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from hsdp_job import check, join_along, kill_and_heal, train_together
from hsdp_model import Model, batch
from loader_job import Elastic, Part
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SHARDS, STEPS = 2, 8


@pytest.fixture
def one_rank(late: ModuleType) -> Iterator[None]:
    """PyTorch's default group with this process only."""
    import tests.late.group  # noqa: F401 (registers the backend)

    dist.init_process_group("cpu:gloo,late:late", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_one_rank_ends_as_plain_training_on_the_cpu(late: ModuleType, one_rank: None) -> None:
    """FSDP2 frees the gradients of a step, which are memory of its own stream, while the device still reads
    them.
    """
    torch.manual_seed(0)
    model = Model().to("late")
    mesh = init_device_mesh("late", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    late.delays(3, 0, 200)
    for step in range(STEPS):
        adam.zero_grad()
        x, y = (t.to("late") for t in batch(step, 0, 0))
        nn.functional.mse_loss(model(x), y).backward()
        adam.step()
    got = {name: p.full_tensor().cpu().flatten() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    check(got, [[0]] * STEPS, 1)


# The rest is slow: four processes per test. test_jobs.py trains with DDP on the device;
# tests/process/test_hsdp.py shards on the CPU.


@pytest.mark.slow
@pytest.mark.parametrize("delays", [0, 1, 2])
def test_two_groups_of_two_ranks_end_as_one_process_with_all_the_data(job_server: None, delays: int) -> None:
    train_together(SHARDS, STEPS, device="late", delays=delays)


@pytest.mark.slow
def test_isolated_groups_end_as_one_process_with_all_the_data(job_server: None) -> None:
    """FSDP2's stream of reductions waits for the worker, and the host goes on."""
    train_together(SHARDS, STEPS, device="late", kind="ProcessGroupBabyLate", delays=3)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ProcessGroupLate", "ProcessGroupBabyLate"])
def test_a_group_is_killed_and_comes_back(job_server: None, kind: str) -> None:
    kill_and_heal(SHARDS, device="late", kind=kind)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_takes_over_its_shards_in_parts(job_server: None) -> None:
    join_along(SHARDS, device="late")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_exact_sums_of_shards_have_the_bits_of_one_process_on_the_cpu(
    job_server: None, tmp_path: Path
) -> None:
    """FSDP2 adds a unit on its stream of reductions, which the reduction over the groups follows."""
    parts = [Part(1), Part(2, 1), Part(2)]
    more = {"reproducible": True, "device": "late"}
    job = Elastic(tmp_path, parts, samples=71, kind="fsdp", ranks=2, seed=3, **more)
    job.run()
    assert job.killed == 1
