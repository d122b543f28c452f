"""FSDP2 over a mesh of replica groups, one of which fails twice. Pending collectives must end, or the job
deadlocks.

The shards of a group are gathered over NCCL; the kind of process group under test averages gradients over the
groups.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="needs FSDP2")

from hsdp_job import kill_and_heal

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fork_server")]


@pytest.mark.parametrize("kind", ["ProcessGroupGloo", "ProcessGroupBabyGloo"])
def test_groups_of_one_rank_that_share_a_device(kind: str) -> None:
    kill_and_heal(1, failures=2, device="cuda", kind=kind)


@pytest.mark.parametrize("kind", ["ProcessGroupNCCL", "ProcessGroupBabyNCCL"])
@pytest.mark.parametrize(
    "shards",
    [pytest.param(count, marks=pytest.mark.nccl_ranks(2 * count)) for count in (1, 2)],
    ids=["1", "2"],
)
def test_nccl_between_groups(shards: int, kind: str) -> None:
    kill_and_heal(shards, failures=2, device="cuda", kind=kind)
