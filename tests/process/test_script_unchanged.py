"""The same script under torchrun trains with one group on upstream and the other on ours, and ends with the
weights of a job on ours only.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from processes import HERE, Event, Job, free_port, ours_path
from upstream import REQUIREMENTS, upstream_path


@cache
def run_script(first: Path, second: Path) -> list[Event]:
    """Run the script as a job of two groups with the torchft below each path; return the final state of each
    group.
    """
    with Job() as job:
        # Both groups are in every quorum, even if one starts much later.
        _, address = job.lighthouse(first, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000)
        groups = [
            job.start(
                f"group{group}",
                [
                    *(sys.executable, "-m", "torch.distributed.run"),
                    *("--nproc_per_node", "1", "--master_port", str(free_port())),
                    HERE / "readme_script.py",
                ],
                path=path,
                env={
                    "REPLICA_GROUP_ID": str(group),
                    "NUM_REPLICA_GROUPS": "2",
                    "TORCHFT_LIGHTHOUSE": address,
                },
            )
            for group, path in enumerate((first, second))
        ]
        job.wait_exit(groups, 120)
        return [group.of("result")[0] for group in groups]


@pytest.mark.slow  # test_mixed_jobs has both packages in one job, and test_train_readme torchrun
@pytest.mark.timeout(300)
@pytest.mark.parametrize("generation", sorted(REQUIREMENTS))
def test_script_runs_unchanged_on_upstream_and_on_ours(generation: str) -> None:
    upstream, ours = upstream_path(generation), ours_path()
    alone, mixed = run_script(ours, ours), run_script(upstream, ours)
    for results in (alone, mixed):
        assert [r["manager"] for r in results] == [{"step": 12, "batches_committed": 24}] * 2
        assert [r["participants"] for r in results] == [2, 2]
        assert results[0]["digest"] == results[1]["digest"]
    # The data and the arithmetic are the same on both; only the order of additions may differ.
    assert mixed[0]["norm"] == pytest.approx(alone[0]["norm"], rel=1e-4)
