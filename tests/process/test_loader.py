"""Each sample counts once per epoch, and the weights are those of one process, with any failures: real
processes, SIGKILL in mid-step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loader_job import BETWEEN, MOMENT, Elastic, Part
from loader_streams import KINDS
from torch.distributed.fsdp import FSDPModule

# 501 steps in three epochs; the last batch of each is smaller.
MANY = 1999
# 8, 4, 2, 1 and 4 groups; between two parts the killed groups are restarted.
SIZES = [
    *(Part(8, 2), Part(8, 2), Part(8, 2), Part(8, 4)),
    *(Part(4, 2), Part(4, 1), Part(4, 2)),
    *(Part(2, 1), Part(2, 1)),
    Part(1),
    *(Part(4, 1), Part(4, 1), Part(4, 1)),
]

# torchdata 0.11 calls what PyTorch 2.15 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

# PyTorch 2.7's fully_shard asserts an event of an accelerator when it has reduced over the replicas.
has_hsdp = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="PyTorch 2.7 has no HSDP on a CPU"
)


def test_four_groups_and_five_kills_end_with_the_bits_of_one_process(tmp_path: Path) -> None:
    job = Elastic(tmp_path, [Part(4, 1), Part(4, 2), Part(4, 2)], samples=71, reproducible=True)
    job.run()
    assert job.killed == 5


@pytest.mark.slow  # tests/integration/test_again.py has it with threads
def test_survivors_compute_only_the_units_of_the_failed_group(tmp_path: Path) -> None:
    parts = [Part(4, 1), Part(4, 2), Part(4, 1)]
    job = Elastic(tmp_path, parts, samples=71, replays=True, seed=18, places=BETWEEN)
    job.run()
    assert job.killed == 4
    assert job.came_again >= 3 + 2 + 2 + 3


@pytest.mark.slow
def test_each_token_of_a_stream_once(tmp_path: Path) -> None:
    job = Elastic(tmp_path, [Part(3, 1), Part(2, 1), Part(4, 2)], samples=150, stream="packed", seed=5)
    job.run()
    assert job.killed == 4


@pytest.mark.slow  # test_survivors_compute_only_the_units_of_the_failed_group has groups of one rank
@has_hsdp
@pytest.mark.parametrize("kind", ["fsdp", "fsdp-sum"])
def test_groups_of_two_ranks_keep_their_shards_of_the_gradients(tmp_path: Path, kind: str) -> None:
    job = Elastic(
        tmp_path, [Part(3, 1), Part(2)], samples=71, kind=kind, ranks=2, replays=True, places=BETWEEN
    )
    job.run()
    assert job.killed == 1
    assert job.came_again == 4


@pytest.mark.slow  # 30 s; test_four_groups_and_five_kills has groups of one rank
@has_hsdp
def test_groups_of_two_ranks_that_shard_the_model(tmp_path: Path) -> None:
    job = Elastic(tmp_path, [Part(2, 1), Part(2)], samples=35, kind="fsdp", ranks=2, seed=3)
    job.run()
    assert job.killed == 1


@pytest.mark.slow  # tests/integration/test_streams.py has groups that do not shard
@has_hsdp
def test_groups_that_shard_the_model_train_on_a_stream(tmp_path: Path) -> None:
    job = Elastic(tmp_path, [Part(2, 1), Part(2)], samples=72, kind="fsdp", ranks=2, stream="packed", seed=3)
    job.run()
    assert job.killed == 1


@pytest.mark.slow  # tests/unit/data/test_histories.py has the rules
@has_hsdp
@pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="refused in this PyTorch")
@pytest.mark.parametrize(
    ("ranks", "parts", "more"),
    [
        (2, [Part(2, 1), Part(2)], {"bf16": True, "heal": "in_passing"}),
        # tests/unit/data/test_sharded_sum.py has a single rank
        *(pytest.param(n, [Part(1), Part(2, 1), Part(2)], {}, marks=pytest.mark.slow) for n in (1, 2)),
    ],
)
def test_shards_of_a_killed_group_end_with_the_bits_of_one_process(
    tmp_path: Path, ranks: int, parts: list[Part], more: dict[str, Any]
) -> None:
    settings = {"reproducible": True, **more}
    job = Elastic(tmp_path, parts, samples=71, kind="fsdp", ranks=ranks, seed=3, **settings)
    job.run()
    assert job.killed == 1
    assert (job.in_passing > 0) == ("heal" in more)


# The rest is slow: more groups, steps and kills. The tests above have each kind once.


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["", "reproducible", "replays"])
def test_eight_to_one_groups_and_twenty_kills(tmp_path: Path, mode: str) -> None:
    modes = dict.fromkeys([mode] if mode else [], True)
    job = Elastic(tmp_path, SIZES, samples=MANY, seed=1, **modes)
    job.run()
    assert job.killed == 20


@pytest.mark.slow  # test_each_token_of_a_stream_once has four kills
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stream", KINDS)
def test_a_stream_and_twenty_kills(tmp_path: Path, stream: str) -> None:
    job = Elastic(tmp_path, SIZES, samples=MANY, stream=stream, seed=1)
    job.run()
    assert job.killed == 20


@pytest.mark.slow(minutes=30)  # the tests above have fewer
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("stream", KINDS)
def test_a_stream_and_a_hundred_kills_at_random_moments(tmp_path: Path, stream: str) -> None:
    job = Elastic(tmp_path, 5 * SIZES, samples=MANY, stream=stream, seed=2, places=MOMENT)
    job.run()
    assert job.killed == 100


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_restore_with_another_number_of_groups(tmp_path: Path, reproducible: bool) -> None:
    parts = [Part(3, 1), Part(2, restored=True), Part(4, 1), Part(3, 1, restored=True)]
    Elastic(tmp_path, parts, samples=191, reproducible=reproducible, seed=2).run()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["dataset", "worker"])
def test_a_group_whose_dataset_fails_ends_and_the_others_continue(tmp_path: Path, place: str) -> None:
    Elastic(
        tmp_path, [Part(3, 1), Part(3, 1), Part(2)], samples=191, reproducible=True, places=(place,)
    ).run()


@pytest.mark.slow  # tests/integration/test_audit.py has groups that are threads
@pytest.mark.timeout(300)
def test_a_group_whose_gradients_are_wrong_ends_and_changes_no_bit(tmp_path: Path) -> None:
    parts = [Part(3, 1), Part(4, 1), Part(3)]
    job = Elastic(tmp_path, parts, samples=71, reproducible=True, audit=1.0, places=("corrupt",))
    job.run()
    assert job.killed == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@has_hsdp
def test_a_rank_whose_gradients_are_wrong_ends_its_group(tmp_path: Path) -> None:
    """Each rank has the gradients of its own units, before FSDP2 reduces them in the group."""
    parts = [Part(3, 1), Part(3)]
    job = Elastic(tmp_path, parts, samples=71, kind="fsdp", ranks=2, audit=1.0, places=("corrupt",))
    job.run()
    assert job.killed == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@has_hsdp
def test_a_divide_factor_of_one_is_a_sum_over_the_ranks(tmp_path: Path) -> None:
    Elastic(tmp_path, [Part(2, 1), Part(2)], samples=35, kind="fsdp-sum", ranks=2, seed=3).run()


@pytest.mark.slow
@pytest.mark.timeout(300)
@has_hsdp
def test_three_groups_of_two_ranks_that_shard_the_model(tmp_path: Path) -> None:
    Elastic(
        tmp_path, [Part(2, 1), Part(3, 1), Part(3, 2), Part(2)], samples=191, kind="fsdp", ranks=2, seed=3
    ).run()
