"""Exact sums of ranks that shard a model, by rows, by columns and in blocks, have the bits of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import HERE, Job, free_port, ours_path
from torch.distributed.fsdp import FSDPModule


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="refused in this PyTorch")
def test_each_way_of_sharding_has_the_bits_of_the_whole_model() -> None:
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with Job() as job:
        ranks = [
            job.python(
                f"rank{rank}",
                Path(HERE) / "sharded_worker.py",
                path=ours_path(),
                env={**env, "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        job.wait_exit(ranks, 90)
        for rank in ranks:
            compared = rank.of("compared")
            assert {event["way"] for event in compared} == {0, 1, 2}
            assert {event["name"] for event in compared if event["none"]} == {"inner.bias"}, "it is frozen"
            assert all(event["alike"] for event in compared), compared
