"""FSDP2 on the test device, over a mesh of two replica groups with two ranks each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hsdp_model import reference
from processes import START_TIMEOUT_S, Job, free_port, ours_path

SHARDS, STEPS = 2, 8


# test_jobs.py trains with DDP on the device; tests/process/test_hsdp.py shards on the CPU.
@pytest.mark.slow
@pytest.mark.processes
def test_two_groups_of_two_ranks_end_as_one_process_with_all_the_data(job_server: None) -> None:
    with Job() as job:
        _, lighthouse = job.lighthouse(ours_path(), min_replicas=2, join_timeout_ms=60000)
        children = []
        for group in range(2):
            env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(SHARDS)}
            children += [
                job.python(
                    f"group{group}-{rank}",
                    Path(__file__).parent / "hsdp.py",
                    f"--group={group}",
                    f"--lighthouse={lighthouse}",
                    path=ours_path(),
                    env={**env, "RANK": str(rank)},
                )
                for rank in range(SHARDS)
            ]
        job.wait(lambda: all(child.of("ready") for child in children), START_TIMEOUT_S, "meshes")
        for child in children:
            child.send(step=STEPS)
        job.wait_exit(children, 90)
        expected = reference(0, [[0, 1]] * STEPS, SHARDS)
        for child in children:
            for name, values in child.of("finished")[0]["weights"].items():
                torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[name]))
