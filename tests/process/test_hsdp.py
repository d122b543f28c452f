"""FSDP2 over a mesh of two replica groups with two ranks each, which fail and return."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hsdp_job import flip_and_heal, join_along, kill_and_heal, train_together
from torch.distributed import TCPStore

pytestmark = [
    # PyTorch 2.7's fully_shard asserts an event of an accelerator when it has reduced over the replicas.
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="PyTorch 2.7 has no HSDP on a CPU"
    ),
    pytest.mark.timeout(300),
]

SHARDS = 2
STEPS = 12


# The test below kills a group of gloo's kind, and test_native.py has three groups of the other one.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", "native"])
def test_two_groups_of_two_ranks(kind: str) -> None:
    options = {}
    if kind == "native":
        if not hasattr(dist.ProcessGroup, "reconfigure"):
            pytest.skip("needs PyTorch >= 2.14, whose groups can be reconfigured")
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        options["native"] = store.port
    train_together(SHARDS, STEPS, **options)


def test_a_group_is_killed_and_comes_back() -> None:
    kill_and_heal(SHARDS)


@pytest.mark.slow  # tests/late/test_heal_along.py has it in one process
@pytest.mark.parametrize("fails", [False, True])
def test_a_group_takes_over_its_shards_in_parts(fails: bool) -> None:
    join_along(SHARDS, fails)


@pytest.mark.slow  # test_a_group_is_killed_and_comes_back has one precision
@pytest.mark.parametrize("in_passing", [False, True])
def test_a_group_with_mixed_precision_takes_over_its_float32_shards(in_passing: bool) -> None:
    (join_along if in_passing else kill_and_heal)(SHARDS, bf16=1)


@pytest.mark.slow  # 15 s; tests/integration/test_divergence.py flips bits of whole parameters
def test_a_flipped_bit_in_a_shard_is_found_by_its_rank_and_healed() -> None:
    flip_and_heal(SHARDS, flip=4)
